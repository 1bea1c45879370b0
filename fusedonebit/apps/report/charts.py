"""Draws what runs have recorded, every record of it; beneath each picture stands what it means and what is good."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from ... import recording
from ..parsing import printable
from ..pictures import METHODS, clear, plt, running_mean, save
from ..units import scaled, size
from .page_tables import number
from .read import Run, Series

WIDTH, HEIGHT, ROW = 6.0, 3.4, 0.4
"""Of a picture and of a run's row of phases, in inches: pictures are read at half their 900 pixels."""
MOST_NAMED, MOST_OWN, LONGEST = 10, 12, 44
"""So many runs are shown by name, so many of a user's own numbers, names of so many letters."""
LOGARITHMIC = 30
"""Times the least of values > 0 from which on the greatest makes their axis logarithmic."""
MEAN_WIDTH = 50
"""A running mean has the memory of a 50th of the records."""
OTHERS = [METHODS[name] for name in ("int8", "powersgd", "ssdm", "diloco")]
"""Colours of no method that a run is called after."""
DASHES = ("-", "--", ":", "-.")
FLOATS = ("warmup", "uncompressed")
"""Phases in which floats are sent."""

LOSS = (
    "Thin: each record of the training loss; thick: its running mean; circles: held out. Lower is better; where runs "
    "part behind a dashed line, from which on bits are sent, compression is what parts them. ▲ a step skipped, ◆ one "
    "refused by the guard, × a loss that is no number."
)
BY_BYTES = "The same losses, by what one rank had sent until then. Further left and lower is better."
PHASES = (
    "Full colour: bits are sent; pale: floats (warm-up, uncompressed); in between: local steps and others. Good: full "
    "from early on. A pale stripe later on is a new warm-up, which the guard has asked for."
)
OWN = "Recorded by the training loop."
ERROR = (
    "The workers' residuals over the norm of the averaged momentum: what compression has yet to make up for. Good: "
    "level once bits are sent. Its height alone is neither good nor bad."
)
BYTES = "What one rank sends in a step. Dotted: what averaging float32 gradients would send. Good: far below it."
SPEED = "Of all ranks together. Higher is better; only runs that had the same machine to themselves compare."
PLAIN = {
    "bytes_step": ("Bytes per step", BYTES),
    "residual_over_momentum": ("Compression error", ERROR),
    "tokens_per_s": ("Tokens per second", SPEED),
    "lr": ("Learning rate", "Of the first parameter group."),
}
KNOWN = (*PLAIN, *recording.STEP_KEYS, "loss", "held_out_loss")
"""Keys that are not a user's own numbers."""


class Picture(NamedTuple):
    """A PNG, what it is called, and what it means."""

    title: str
    note: str
    png: bytes


class Pictures:
    """Draws runs between two steps, or from their first to their last."""

    def __init__(self, runs: Sequence[Run], span: tuple[float, float] | None = None) -> None:
        steps = [step for run in runs for series in run.series.values() for step in (series.steps[0], series.steps[-1])]
        self.span = span or (min(steps, default=0), max(steps, default=1))
        self.runs = list(zip(runs, styles(runs), strict=True))

    def all(self) -> Iterator[Picture]:
        """Draw what there is to draw."""
        keys = dict.fromkeys(key for run, _ in self.runs for key in run.series)
        if "loss" in keys:
            yield self._picture("Loss", LOSS, self.losses)
            if any((run.last("bytes_total") or 0) > 0 for run, _ in self.runs):
                yield self._picture("Loss against bytes sent", BY_BYTES, partial(self.losses, by_bytes=True))
        own = [key for key in keys if key not in KNOWN][:MOST_OWN]
        for key, (title, note) in {**PLAIN, **{key: (key, OWN) for key in own}}.items():
            if key in keys:
                yield self._picture(title, note, partial(self.numbers, key=key))
        if "phase" in keys:
            yield self._picture("Phases", PHASES, self.phases, ROW * min(len(self.runs), MOST_NAMED) + 0.7)

    def _picture(self, title: str, note: str, draw: Callable[[Axes], None], height: float = HEIGHT) -> Picture:
        data = io.BytesIO()
        with rc_context({"text.parse_math": False}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # letters that the font lacks are boxes
            figure, axis = plt.subplots(figsize=(WIDTH, height), layout="constrained")
            draw(axis)
            clear([axis])
            handles, names = axis.get_legend_handles_labels()
            if handles:
                names[MOST_NAMED:] = [f"and {len(names) - MOST_NAMED} more runs"] * (len(names) > MOST_NAMED)
                columns = 1 if max(map(len, names)) > LONGEST / 2 else 2
                figure.legend(handles[: len(names)], names, frameon=False, loc="outside upper left", ncols=columns)
                axis.set_ylabel(_name(title.lower()))
            save(figure, data)
        return Picture(title, note, data.getvalue())

    def losses(self, axis: Axes, by_bytes: bool = False) -> None:
        """Draw training and held-out losses over steps or bytes, and what steps came to nothing."""
        for run, style in self.runs:
            (x, y), (x_out, held_out) = (self._points(run, key, by_bytes) for key in ("loss", "held_out_loss"))
            there, keep = np.isfinite(y), 1 - min(1, MEAN_WIDTH / max(1, len(y)))
            if len(x):
                axis.plot(x, y, alpha=0.35, linewidth=0.8, **style)
                axis.plot(x[there], [*running_mean(y[there], keep)], **_named(run, len(y)), **style)
            axis.plot(x_out, held_out, "o", color=style["color"], markerfacecolor="white", markersize=4)
            refused, skipped = rises(run.get("vetoed_steps")), rises(run.get("skipped_steps"))
            marks = {"^": (np.setdiff1d(skipped, refused), 0.03), "D": (refused, 0.03), "x": (x[~there], 0.97)}
            for sign, (steps, at) in {} if by_bytes else marks.items():
                axis.plot(steps, at + 0 * steps, sign, color=style["color"], transform=axis.get_xaxis_transform())
        if by_bytes:
            axis.set_xscale("log", nonpositive="mask")
            axis.set_xlabel("bytes sent by one rank")
            axis.xaxis.set_major_formatter(lambda value, _: size(value))
        else:
            self._over_steps(axis)
        _fit(axis, number)

    def numbers(self, axis: Axes, key: str) -> None:
        """Draw the numbers of one key; with bytes those that float32 takes."""
        for run, style in self.runs:
            x, y = self._points(run, key)
            if len(x):
                axis.plot(x, y, **_named(run, len(x)), **style)
            if key == "bytes_step":
                axis.plot(*self._points(run, "bytes_fp32"), color=style["color"], linestyle=":", linewidth=1)
        self._over_steps(axis)
        _fit(axis, size if key == "bytes_step" else number, zero=True)

    def phases(self, axis: Axes) -> None:
        """Draw a row for each run: what is sent in each step; phases are named in their order."""
        some = self.runs[:MOST_NAMED]
        for row, (run, style) in enumerate(some):
            steps, kinds = sent(run)
            for what, alpha in ((0, 0.25), (1, 0.6), (2, 1.0)):
                bars: dict[str, Any] = {"color": style["color"], "alpha": alpha, "linewidth": 0.6, "step": "post"}
                axis.fill_between(steps, row - 0.4, row + 0.4, where=kinds == what, **bars)
        names = [f"{_name(run.label)}\n{_name(', '.join([*run.phases][:4]))}" for run, _ in some]
        axis.set_yticks(range(len(some)), names, fontsize=8)
        axis.invert_yaxis()
        self._over_steps(axis, begins=False)

    def _points(self, run: Run, key: str, by_bytes: bool = False) -> tuple[Any, Any]:
        """Return steps, or the bytes sent until then, and values; NaN for those that are no numbers."""
        series, sent = run.get(key).cut(*self.span), run.get("bytes_total")
        x, y = np.asarray(series.steps), np.asarray(series.values, float)
        if by_bytes:
            x = np.array([0, *sent.values])[np.searchsorted(np.asarray(sent.steps), x, "right")]
        return x, np.where(np.isfinite(y), y, np.nan)

    def _over_steps(self, axis: Axes, begins: bool = True) -> None:
        for run, style in self.runs if begins else ():
            steps, kinds = sent(run)
            first = steps[kinds == 2][:1]
            if len(first) and first[0] > steps[0]:
                axis.axvline(first[0], color=style["color"], linestyle="--", linewidth=0.8, alpha=0.6)
        if self.span[1] > self.span[0]:
            axis.set_xlim(*self.span)
        axis.set_xlabel("step")
        axis.xaxis.set_major_formatter(lambda value, _: scaled(value, {"M": 1e6, "k": 1e3, "": 1}).replace(" ", ""))


def styles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return how each run is drawn: the first of a known method in its colour, others in what is free."""
    known, found = {method.replace("-", ""): colour for method, colour in METHODS.items()}, []
    for run in runs:
        names = [str(name).replace("-", "").lower() for name in (run.name, run.header.get("class"))]
        own = [known[method] for name in names for method in known if name.startswith(method)]
        free = [{"color": colour, "linestyle": dashes} for dashes in DASHES for colour in (*own[:1], *OTHERS)]
        found.append(next((style for style in free if style not in found), free[0]))
    return found


def rises(series: Series) -> Any:
    """Return the steps at which a count has risen; a resumed run may have begun to count anew."""
    return np.asarray(series.steps)[np.diff(np.asarray(series.values, float), prepend=0) > 0]


def sent(run: Run) -> tuple[Any, Any]:
    """Return steps, and what was sent in each: 0 floats, 2 bits, 1 neither or what is not known."""
    kinds = [0 if name in FLOATS else 2 if name in recording.COMPRESSED else 1 for name in run.phases]
    series = run.get("phase")
    return np.asarray(series.steps), np.array([kinds[int(i)] for i in series.values])


def _fit(axis: Axes, told: Callable[[float], str], zero: bool = False) -> None:
    """Make the axis of values logarithmic where they differ much; else it may begin at 0."""
    curves = [line.get_ydata() for line in axis.get_lines() if line.get_transform() == axis.transData]
    found = np.concatenate([np.zeros(0), *(np.asarray(values, float) for values in curves)])
    least, most = np.nanmin(found, initial=np.inf), np.nanmax(found, initial=-np.inf)
    if 0 < least < most / LOGARITHMIC:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < 1e3 * least else (1,)))
    elif zero and least >= 0:
        axis.set_ylim(bottom=0)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: told(value))


def _named(run: Run, records: int) -> dict[str, Any]:
    """Return what makes a run's curve the one that is named; of few records each is a dot as well."""
    return {"label": _name(run.label), "linewidth": 1.8, "marker": "." if records < 20 else None}


def _name(text: str) -> str:
    """Return a text as a picture can have it: at most ``LONGEST`` letters, the last ones."""
    told = printable(text)[-LONGEST:]
    return f" {told}" if told.startswith("_") else told  # matplotlib leaves out what begins so
