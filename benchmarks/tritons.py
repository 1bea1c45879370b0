"""Compiles what whole steps launch, with the oldest and the newest Triton claimed: ``python -m benchmarks.tritons``.

No GPU is needed. The launch keys of whole steps are recorded once, all are compiled for sm_90 with each Triton, and of
each kernel one or two for the other targets. The oldest Triton lies in ``build/``, where pip puts it the first time.
With ``--update`` the record is ``benchmarks/results/tritons.json``, and docs/tables/tritons.md has it as a table.
Exits with 1 where any does not compile, or has a race between warps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from .pages import RESULTS, ROOT, TABLES, keep, markdown, read, write_tables

BUILD = ROOT / "build"
RECORD = RESULTS / "tritons.json"
EVERY, OTHERS = "sm_90", ("sm_75", "sm_80", "sm_100", "gfx942")
PAGE = TABLES / "tritons.md"


def claimed(constraints: str, package: str = "triton") -> str:
    """Returns the version of a package that a file of constraints names."""
    (version,) = re.findall(rf"^{package}==([\d.]+)$", (ROOT / constraints).read_text(), re.MULTILINE)
    return str(version)


def installed(version: str) -> Path | None:
    """Returns a folder with a Triton, installed if need be; None of the one that is here anyway."""
    if version == triton.__version__:
        return None
    folder = BUILD / f"triton-{version}"
    if not (folder / "triton" / "__init__.py").is_file():
        print(f"installing Triton {version} into {folder}: a minute, the first time", flush=True)
        what = ["--quiet", "--no-deps", "--target", str(folder), f"triton=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "install", *what], check=True)
    return folder


def recorded(path: Path) -> int:
    """Records the launch keys of whole steps; returns how many there are."""
    print("recording what whole steps launch: a minute or two", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "tests/whole_steps.py", str(path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return len(json.loads(path.read_text()))


def compiled(path: Path, version: str, folder: Path | None, *arguments: str) -> dict[str, Any]:
    """Compiles keys in a process of that Triton, on both cores; returns what it says of them, a row of the record."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks.launch_keys", str(path), "--processes", "2", "--any-spills"]
    command += arguments
    began, lines = time.monotonic(), []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    found = re.search(r"(\d+) of (\d+) keys compiled for (\w+) with Triton ([\d.]+)", "".join(lines))
    if found is None or found[4] != version:
        raise RuntimeError(f"Triton {version} must compile, but {' '.join(command)} has not said so: see above")
    row = {"triton": version, "target": found[3], "compiled": int(found[1]), "keys": int(found[2])}
    return row | {"wrong": process.returncode != 0, "seconds": round(time.monotonic() - began)}


def executed() -> list[dict[str, str]]:
    """Returns the pairs with which the suite executes kernels, in Triton's interpreter."""
    files = {"make test": "constraints.txt", "make test-oldest": "constraints-oldest.txt"}
    return [{"by": by, "torch": claimed(file, "torch"), "triton": claimed(file)} for by, file in files.items()]


def on_gpus() -> dict[tuple[str, str], str]:
    """Returns the GPUs on which each torch and Triton ran, by the records of ``make gpu-speed``."""
    found = [each["about"] for path in RESULTS.glob("*/speed.json") for each in read(path)]
    return {(each["torch"].partition("+")[0], each["triton"]): each["device"] for each in found}


def table(record: Mapping[str, Any]) -> str:
    """Returns the record as Markdown."""
    rows = [["Python", "torch", "Triton", "target", "launch keys compiled"]]
    for row in record["rows"]:
        counted = f"{row['compiled']:,} of {row['keys']:,}"
        rows.append([record["python"], record["torch"], row["triton"], row["target"], counted])
    gpus, ran = on_gpus(), [["torch", "Triton", "executed in Triton's interpreter by", "run on a GPU"]]
    for each in executed():
        pair = each["torch"], each["triton"]
        ran.append([*pair, f"`{each['by']}`", gpus.get(pair, "never")])
    return f"{markdown(rows, range(4))}\n{markdown(ran, range(4))}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tritons", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--keys", type=Path, default=BUILD / "launch_keys.json", help="where to record launch keys")
    parser.add_argument("--again", action="store_true", help="compile keys that are recorded there already")
    parser.add_argument("--update", action="store_true", help="write the record and docs/tables/tritons.md")
    given = parser.parse_args(arguments)
    path = given.keys.resolve()
    if not (given.again and path.is_file()):
        recorded(path)
    versions = [claimed("constraints-oldest.txt"), triton.__version__]
    rows = []
    for version in versions:
        folder = installed(version)
        rows.append(compiled(path, version, folder, "--target", EVERY))
        rows += [compiled(path, version, folder, "--once-per-kernel", "--target", target) for target in OTHERS]
    if given.update:
        record = {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0], "rows": rows}
        keep(record, RECORD)
        write_tables(PAGE, table(record))
    for row in rows:
        print("{compiled} of {keys} keys compiled for {target} with {triton}, {seconds} s".format(**row))
    whole = ", ".join("{compiled} of {keys} with {triton}".format(**row) for row in rows if row["target"] == EVERY)
    print(f"launch keys compiled: {whole}")
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
