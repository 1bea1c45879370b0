"""What is good and what is bad about runs, in sentences that follow from what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Literal, NamedTuple

from ..units import size
from .page_tables import number, saving
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
    """Return what can be said of a run, beside the one that ``baseline`` finds."""
    return [*_losses(run), *_bytes(run), *_interruptions(run), *_held_out(run, base)]


def baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    """Return the one run of the same folder, or else of all, that has compressed nothing; None if there is not one."""
    found = [each for each in runs if list(each.phases) == ["uncompressed"]]
    beside = [each for each in found if each.folder == run.folder]
    return next((some[0] for some in (beside, found) if len(some) == 1), None)


def _losses(run: Run) -> Iterator[Verdict]:
    losses = run.get("loss")
    if losses.steps and not math.isfinite(losses.values[-1]):
        yield Verdict("bad", f"ended with a loss that is no number, at step {losses.steps[-1]:,}.")


def _bytes(run: Run) -> Iterator[Verdict]:
    fewer, sent = saving(run), size(run.last("bytes_total") or 0)
    if list(run.phases) == ["warmup"]:
        yield Verdict("bad", f"has not compressed yet: all its {run.last_step:,} steps were warm-up.")
    elif fewer is not None and list(run.phases) != ["uncompressed"]:
        if fewer < SAVES:
            yield Verdict("bad", f"sent {sent}, no fewer bytes than float32 gradients would have taken.")
        else:
            yield Verdict(
                "good", f"sent {sent}, {number(fewer, 3)} times less than float32 gradients would have taken."
            )


def _interruptions(run: Run) -> Iterator[Verdict]:
    refused = run.last("vetoed_steps") or 0
    skipped = (run.last("skipped_steps") or 0) - refused
    if skipped > 0:
        yield Verdict("bad", f"skipped {number(skipped)} of {run.last_step:,} steps: a gradient was no number.")
    if refused > 0:
        yield Verdict("bad", f"had {number(refused)} updates refused by the guard: they would have diverged.")


def _held_out(run: Run, base: Run | None) -> Iterator[Verdict]:
    """Compare a held-out loss with the run's own best, and with another's at the last step that both have."""
    ours, theirs = dict(run.get("held_out_loss").finite()), dict(base.get("held_out_loss").finite() if base else ())
    if ours:
        best = min(ours, key=ours.__getitem__)
        risen = list(ours.values())[-1] / ours[best] - 1 if ours[best] > 0 else 0.0
        if risen > RISEN:
            yield Verdict("bad", f"has a held-out loss {risen:.1%} above its best, which was at step {best:,}.")
    shared = ours.keys() & theirs.keys()
    if base is not None and base is not run and shared and theirs[max(shared)] > 0:
        step = max(shared)
        above = ours[step] / theirs[step] - 1
        where = f"{abs(above):.1%} {'above' if above > 0 else 'below'} that of {base.label}, at step {step:,}"
        yield Verdict("good" if above <= AS_GOOD else "bad", f"has a held-out loss {where}.")
