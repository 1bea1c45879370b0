"""What is good and what is bad about runs, in sentences that follow from what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

from .page_tables import in_bytes, last, number, saving
from .read import Run

SAVES = 1.05
"""Times fewer bytes than float32 gradients from which on a run counts as one that saves."""
AS_GOOD = 0.01
"""Share by which a held-out loss may lie above the uncompressed run's."""
RISEN = 0.05
"""Share by which a held-out loss may lie above its own best."""
MARKS = {"good": "✓", "bad": "✗"}


class Verdict(NamedTuple):
    """A sentence about a run, which begins with the run's name."""

    kind: Literal["good", "bad"]
    text: str


def section(runs: Sequence[Run]) -> str:
    """Return the page's list of all verdicts; a sentence where there are none."""
    items = [
        f'<li class="{each.kind}">{MARKS[each.kind]} <b>{escape(run.label)}</b> {escape(each.text)}</li>'
        for run in runs
        for each in judge(run, baseline(run, runs))
    ]
    return f'<ul class="verdicts">{"".join(items)}</ul>' if items else "<p>Nothing was recorded that can be judged.</p>"


def judge(run: Run, base: Run | None = None) -> list[Verdict]:
    """Return what can be said of a run.

    Args:
        run: Whose record is judged.
        base: What it is compared with, as ``baseline`` finds it.
    """
    found = [_loss(run), _bytes(run), *_interruptions(run), _trend(run)]
    if base is not None and base is not run:
        found.append(_beside(run, base))
    return [each for each in found if each is not None]


def baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return the one run of the same folder, or else of all, that has compressed nothing; None if there is not one."""
    found = [each for each in runs if each.phases == ["uncompressed"]]
    beside = [each for each in found if each.folder == run.folder]
    return next((some[0] for some in (beside, found) if len(some) == 1), None)


def _loss(run: Run) -> Verdict | None:
    losses = run.get("loss")
    if losses.steps and not math.isfinite(losses.values[-1]):
        return Verdict("bad", f"ended with a loss that is no number, at step {losses.steps[-1]:,}.")
    return None


def _bytes(run: Run) -> Verdict | None:
    fewer = saving(run)
    if run.phases == ["warmup"]:
        return Verdict("bad", f"has not compressed yet: all its {run.last_step:,} steps were warm-up.")
    if fewer is None or run.phases == ["uncompressed"]:
        return None
    sent = in_bytes(last(run, "bytes_total"))
    if fewer < SAVES:
        return Verdict("bad", f"sent {sent}, no fewer bytes than float32 gradients would have taken.")
    return Verdict("good", f"sent {sent}, {number(fewer, 3)} times less than float32 gradients would have taken.")


def _interruptions(run: Run) -> list[Verdict]:
    refused = last(run, "vetoed_steps") or 0
    skipped = (last(run, "skipped_steps") or 0) - refused
    found = []
    if skipped > 0:
        found.append(Verdict("bad", f"skipped {number(skipped)} of {run.last_step:,} steps: a gradient was no number."))
    if refused > 0:
        found.append(Verdict("bad", f"had {number(refused)} updates refused by the guard: they would have diverged."))
    return found


def _held_out(run: Run) -> list[tuple[int, float]]:
    told = run.get("held_out_loss")
    return [(step, loss) for step, loss in zip(told.steps, told.values, strict=True) if math.isfinite(loss)]


def _trend(run: Run) -> Verdict | None:
    held = _held_out(run)
    if len(held) < 2:
        return None
    step, best = min(held, key=lambda each: each[1])
    risen = held[-1][1] / best - 1 if best > 0 else 0.0
    if risen <= RISEN:
        return None
    return Verdict("bad", f"has a held-out loss {risen:.1%} above its best, which was at step {step:,}.")


def _beside(run: Run, base: Run) -> Verdict | None:
    """Compare held-out losses at the last step that both have."""
    ours, theirs = dict(_held_out(run)), dict(_held_out(base))
    shared = ours.keys() & theirs.keys()
    if not shared or not theirs[max(shared)] > 0:
        return None
    step = max(shared)
    above = ours[step] / theirs[step] - 1
    where = f"{abs(above):.1%} {'above' if above > 0 else 'below'} that of {base.label}, at step {step:,}"
    return Verdict("good" if above <= AS_GOOD else "bad", f"has a held-out loss {where}.")
