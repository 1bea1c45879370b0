"""README's picture: held-out loss over the bytes of whole runs, uncompressed, in bfloat16 and ours.

``python -m benchmarks.loss_bytes`` trains the lab's byte-level transformer with each method and seed (two minutes on
one core), writes the record, draws ``docs/loss-over-bytes.png`` and prints what it shows; ``--recorded`` trains
nothing. All have the learning rate that the lab found for AdamW. Losses are means over the seeds.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lab.alike import AlikeTransport
from benchmarks.lab.records import Records
from benchmarks.lab.run import Key, Training, Worker

from . import lab_page
from .pages import DOCS, RESULTS, read

TASK, WORKERS, SEEDS, EVERY = "causal", 4, (0, 1, 2), 20
"""``EVERY``: steps between two held-out losses."""
METHODS = {
    "adamw": "AdamW, fp32 all-reduce",
    "bf16": "AdamW, bf16 all-reduce",
    "onebit-adam-living": "OneBitAdam",
    "zero-one-adam-shared": "ZeroOneAdam",
}
"""By the lab's names; ours with their defaults, but for 1-bit Adam's warm-up, which is 5 % of the steps."""
RECORD = RESULTS / "loss-bytes.json"
PICTURE = DOCS / "loss-over-bytes.png"
TICKS = (0.3, 1, 3, 10, 30, 100)
Found = Mapping[str, Any]


class Curve(NamedTuple):
    """A method's run: after so many megabytes that each worker has sent, a held-out loss."""

    name: str
    megabytes: list[float]
    losses: list[float]


class Watched(Worker):
    """A worker of the lab that looks at its held-out loss and its bytes every few steps."""

    def __init__(self, training: Training) -> None:
        super().__init__(training, 0, AlikeTransport(0, training.key.workers))
        self.seen = [(0, 0, training.validate())]

    def step(self, step: int) -> None:
        """Take one step of all optimizers."""
        super().step(step)
        if (step + 1) % EVERY == 0:
            self.seen.append((step + 1, self.transport.traffic.bytes_total, self.training.validate()))


def train(key: Key) -> dict[str, Any]:
    """Return a run's steps, bytes sent so far by each worker, and held-out losses."""
    worker = Watched(Training(key))
    worker.train()
    steps, sent, losses = zip(*worker.seen, strict=True)
    return {"method": key.optimizer, "seed": key.seed, "lr": key.lr, "steps": steps, "sent": sent, "losses": losses}


def measure() -> dict[str, Any]:
    """Train with each method and seed."""
    rates = Records(lab_page.RESULTS / "runs.jsonl")
    rate = rates.tuned(TASK, "adamw")
    assert rate is not None, f"the lab has found no rate for AdamW on {TASK}"
    runs = []
    for name in METHODS:
        for seed in SEEDS:
            runs.append(train(Key(TASK, name, seed, WORKERS, rate)))
            print(f"{METHODS[name]}, seed {seed}: {runs[-1]['losses'][-1]:.4f}", flush=True)
    facts = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
    return {**facts, "workers": WORKERS, "runs": runs}


def curves(found: Found) -> list[Curve]:
    """Return each method's mean over the seeds."""
    made = []
    for name in METHODS:
        runs = [run for run in found["runs"] if run["method"] == name]
        sent, losses = (_mean([run[key] for run in runs]) for key in ("sent", "losses"))
        made.append(Curve(name, [1e-6 * each for each in sent], losses))
    return made


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(rows) for values in zip(*rows, strict=True)]


def summary(made: Sequence[Curve]) -> str:
    """Return, a line for each method, the bytes of its run, how many times fewer than the first's, and its loss."""
    first = made[0]
    return "\n".join(
        f"{METHODS[curve.name]}: {curve.megabytes[-1]:.1f} MB, {first.megabytes[-1] / curve.megabytes[-1]:.1f} times "
        f"fewer; held-out loss {curve.losses[-1]:.3f} ({curve.losses[-1] / first.losses[-1] - 1:+.1%})"
        for curve in made
    )


def draw(found: Found, path: Path) -> None:
    """Draw it 900 pixels wide, with letters that are legible at half of that."""
    from fusedonebit.apps.pictures import clear, method_colour, plt, save

    made = curves(found)
    with plt.rc_context({"font.size": 15}):
        figure, axis = plt.subplots(figsize=(9, 4.9), layout="constrained")
        for curve in made:
            colour = method_colour(curve.name)
            end = curve.megabytes[-1], curve.losses[-1]
            fewer = made[0].megabytes[-1] / end[0]
            told = f"{end[0]:.{end[0] < 10:d}f} MB" + (f"\n{fewer:.0f}x less" if curve is not made[0] else "")
            axis.plot(curve.megabytes[1:], curve.losses[1:], color=colour, linewidth=3, label=METHODS[curve.name])
            axis.plot(*end, "o", color=colour, markersize=10)
            side = {"onebit-adam-living": "left", "zero-one-adam-shared": "right"}.get(curve.name, "center")
            axis.annotate(told, end, (0, -12), textcoords="offset points", ha=side, va="top", color=colour)
        axis.set(
            xscale="log", ylim=(1.68, None), xlabel=f"MB sent by each of {found['workers']} workers in the whole run"
        )
        axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axis.minorticks_off()
        axis.set_ylabel("held-out loss, nats per byte")
        axis.legend(frameon=False, loc="upper right", handlelength=1.2)
        clear([axis])
        save(figure, path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="draw what was recorded")
    if not parser.parse_args().recorded:
        RECORD.write_text(json.dumps(measure()) + "\n")
    found = read(RECORD)
    draw(found, PICTURE)
    print(f"{summary(curves(found))}\nwrote {PICTURE}")


if __name__ == "__main__":
    main()
