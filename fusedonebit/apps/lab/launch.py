"""Runs the lab's runs on all cores, goes on where it was stopped, and reports."""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ... import FusedOneBitWarning
from ..arguments import missing
from .contenders import Key
from .report import named, table, traffic, verdicts
from .run import run


def run_lab(tasks: Sequence[str], optimizers: Sequence[str], seeds: int, workers: int, out: Path) -> None:
    """Make every run of the product that ``out``/runs.jsonl lacks, then the table and the plots of all of it."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "runs.jsonl"
    # Seed by seed, so that what a stopped lab has is paired.
    wanted = [Key(t, o, seed, workers) for seed, t, o in itertools.product(range(seeds), tasks, optimizers)]
    done = {_key(record): record for record in _read(results)}
    missing = [key for key in wanted if key not in done]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Spawned, one thread each: simulated workers are threads, and their steps are short.
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=mp.get_context("spawn"), initializer=_prepare)
    with pool, Progress(*columns, console=Console(highlight=False)) as progress, results.open("a") as file:
        bar = progress.add_task("runs", total=len(wanted), completed=len(wanted) - len(missing))
        futures = [pool.submit(run, key) for key in missing]
        try:
            for future in as_completed(futures):
                record = future.result()
                done[_key(record)] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                progress.update(bar, advance=1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report([done[key] for key in wanted], out)


def report(records: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Print and write the tables, and draw the plots where matplotlib is."""
    records = named(records)
    text = "\n".join([table(records), verdicts(records), traffic(records)])
    print(text)
    (out / "table.md").write_text(text)
    if absent := missing("matplotlib"):
        print(f"wrote {out / 'runs.jsonl'} and {out / 'table.md'}; pictures need {absent}")
        return
    from .plots import plot

    plot(records, out / "losses.png")
    print(f"wrote {out / 'runs.jsonl'}, {out / 'table.md'} and {out / 'losses.png'}")


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FusedOneBitWarning)


def _key(record: dict[str, Any]) -> Key:
    return Key(*(record[field] for field in asdict(Key("", "", 0))))


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # stopped while it wrote its last line
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]
