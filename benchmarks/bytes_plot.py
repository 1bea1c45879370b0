"""The picture of ``bytes_moved``: two panels of bars, one row for each optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import deepspeed_peer
from .registry import DRY_RUN, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = {
    "AdamW": "adamw",
    "1-bit Adam": "onebit-adam",
    "1-bit LAMB": "onebit-lamb",
    "0/1 Adam": "zero-one-adam",
    "1-bit Lion": "onebit-lion",
    "Marsit": "marsit",
}
"""What pictures call each algorithm."""
OTHERS = 0.55
"""How much lighter an algorithm is where it is not ours."""
COPIES, INK, FAINT = "#d0d0d0", "#222222", "#6b6b6b"
HEIGHT, GAP = 0.78, 0.55
"""Of a bar, and between algorithms, in rows."""
ABOUT = "Bytes per parameter and step"
COUNTED = (
    "Counted, not timed: ours from the compiled kernels (sm_90), the others operation by operation "
    "(DeepSpeed {version}).\n"
    "0/1 Adam: the mean of a round of {round} steps, the last of which sends."
)


class Bar(NamedTuple):
    """A row of the picture, and what stands at its bars."""

    name: str
    method: str
    ours: bool
    device: float
    copies: float
    sent: float
    at_device: str
    at_sent: str


def bars(record: Record) -> list[list[Bar]]:
    """Of each algorithm its bars, from the top down."""
    found: dict[str, list[Bar]] = {}
    rows = record["tables"][0]["rows"]
    for row in rows:
        name, copies, fewer = row["optimizer"], row["DDP's copies B"] or 0.0, row["x fewer sent"]
        is_torch, is_theirs = copies > 0, name.startswith("DeepSpeed")
        at_device = f"{row['device B']:.0f} + {copies:.0f} in DDP's buckets" if is_torch else f"{row['device B']:.1f}"
        if is_theirs and (ours := _ours(rows, row["algorithm"])):
            at_device += f", {row['device B'] / ours:.1f}× ours"
        at_sent = f"{row['sent B']:.2g}" + (f", {fewer:.0f}× fewer" if round(fewer) > 1 else ", fp32")
        shown, is_ours = f"torch {name}, DDP" if is_torch else name, not (is_torch or is_theirs)
        moved = (row["device B"], copies, row["sent B"], at_device, at_sent)
        bar = Bar(shown, METHODS[row["algorithm"]], is_ours, *moved)
        found.setdefault(row["algorithm"], []).append(bar)
    return list(found.values())


def _ours(rows: list[Record], algorithm: str) -> float | None:
    """What our optimizer of an algorithm moves."""
    found = [row["device B"] for row in rows if row["algorithm"] == algorithm]
    return found[-1] if len(found) > 1 else None


def told(record: Record) -> str:
    """All numbers of the picture in words, which it carries with it."""
    rows = [f"{bar.name}: {bar.at_device}; sent {bar.at_sent}" for group in bars(record) for bar in group]
    return f"{ABOUT}. {'. '.join(rows)}.".replace("×", "x")


def draw(record: Record, path: Path) -> None:
    """Left what is moved in device memory, right what is sent."""
    from fusedonebit.apps.pictures import lighter, method_colour, plt

    rows = _places(bars(record))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 5.2), sharey=True, layout="constrained", width_ratios=(1.5, 1)
    )
    for place, bar in rows:
        colour = lighter(method_colour(bar.method), 0.0 if bar.ours or bar.method == "adamw" else OTHERS)
        left.barh(place, bar.device, HEIGHT, color=colour)
        left.barh(place, bar.copies, HEIGHT, left=bar.device, color=COPIES)
        right.barh(place, bar.sent, HEIGHT, color=colour)
        _write(left, bar.device + bar.copies, place, bar.at_device)
        _write(right, bar.sent, place, bar.at_sent)
    left.set_yticks([place for place, _ in rows], [bar.name for _, bar in rows])
    for label, (_, bar) in zip(left.get_yticklabels(), rows, strict=True):
        label.set_color(method_colour(bar.method) if bar.ours else INK)
        label.set_fontweight("bold" if bar.ours else "normal")
    _frame(left, max(bar.device for _, bar in rows), "moved in device memory")
    _frame(right, max(bar.sent for _, bar in rows), "sent on the network")
    left.invert_yaxis()
    counted = COUNTED.format(version=deepspeed_peer.VERSION, round=deepspeed_peer.ROUND)
    figure.supxlabel(counted, x=0.01, ha="left", fontsize=8, color=FAINT)
    figure.suptitle(f"{ABOUT}, fp32, one rank of 8", x=0.01, ha="left", fontsize=12, color=INK)
    if record["about"]["dry_run"]:
        figure.text(0.5, 0.5, DRY_RUN, ha="center", fontsize=24, alpha=0.4)
    figure.savefig(path, dpi=130, metadata={"Description": told(record), "Software": None})
    plt.close(figure)
    print(path)


def _places(groups: list[list[Bar]]) -> list[tuple[float, Bar]]:
    """Heights of the rows, with gaps between the algorithms."""
    place, found = 0.0, []
    for group in groups:
        for bar in group:
            found.append((place, bar))
            place += 1
        place += GAP
    return found


def _write(axis: Axes, x: float, place: float, text: str) -> None:
    axis.annotate(
        text, (x, place), (4, 0), textcoords="offset points", va="center", fontsize=9, color=INK, annotation_clip=False
    )


def _frame(axis: Axes, most: float, title: str) -> None:
    """No ticks: the values stand at the bars."""
    axis.set_title(title, loc="left", fontsize=10, color=FAINT)
    axis.set_xlim(0, 1.12 * most)
    axis.set_xticks([])
    axis.tick_params(left=False, labelsize=9.5)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.spines["left"].set_color("#b0b0b0")
