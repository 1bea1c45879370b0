"""Records runs for ``fusedonebit report``, from any training loop: lines of JSON in a folder.

``metrics.jsonl`` has one line per recorded step, ``starts.jsonl`` one each time a run was started or resumed.
docs/run-report.md lists the keys.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.options import check_count, is_int
from ..core.resolved import Options

METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"
FORMAT = 1

STEP_KEYS = ("phase", "bytes_step", "bytes_total", "bytes_fp32", "skipped_steps", "vetoed_steps", "rewarms")
"""Keys of ``stats()`` that are recorded, where they are not None."""

COMPRESSED = ("compression", "one-bit")
"""Phases in which bits are sent."""

LONGEST_LINE = 1 << 24
"""Bytes; layers by the ten thousand take fewer."""

LAYERS_GROWTH = 18
"""Layers are recorded when the steps have grown by this share, an 18th: some 190 times in 100,000 steps."""


class Recorder:
    """Writes what a run does into a folder, step by step, for ``fusedonebit report``.

    Every rank makes one and calls ``log`` alike; rank 0 alone writes, what it sees: losses are those that it is
    given, bytes and layers' residuals are its own. No collective is called. A step that is recorded waits for the
    device, as ``optimizer.stats()`` does.

    A run that goes on after step n, because it logs n + 1 first, keeps its records up to n and drops those behind,
    which are made again; so one that begins again at its first step replaces what was there under its name. Lines
    are written whole, one by one: a run that is killed loses at most the last.

    Args:
        folder: Made if need be. May hold several runs, of different names.
        optimizer: Any ``torch.optim.Optimizer``; those of this package tell phases, bytes and errors.
        name: Of the run in its folder; None: the optimizer's class.
        every: Record every so manieth step. Steps with a ``held_out_loss``, and the last, are recorded too.
        layers_every: Look at all layers every so manieth step; 0: never. None: ever more rarely, some 200 times
            in 100,000 steps.
        settings: Plain values that tell runs apart, for the report's table.
        bytes_before: What a resumed run had sent before ``optimizer`` began to count; None: if its count is less
            than that of the last record kept, that is added.

    Raises:
        ValueError: if ``every`` or ``layers_every`` make no sense.
        OSError: if the folder can't be written.

    Example::

        with Recorder("runs/mine", optimizer, every=10) as recorder:
            for step in range(1, steps + 1):
                ...
                optimizer.step()
                recorder.log(step, loss=loss)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer,
        *,
        name: str | None = None,
        every: int = 10,
        layers_every: int | None = None,
        settings: Mapping[str, Any] | None = None,
        bytes_before: int | None = None,
    ) -> None:
        for argument, value, least in (("every", every, 1), ("layers_every", layers_every, 0)):
            if value is not None and not (is_int(value) and value >= least):
                raise ValueError(f"{argument} must be an int >= {least}, got {value!r}")
        self.folder, self.name = Path(folder), name or type(optimizer).__name__
        self._optimizer, self._every, self._layers_every = optimizer, every, layers_every
        self._stats: Callable[..., dict[str, Any]] | None = getattr(optimizer, "stats", None)
        self._tells_layers = self._stats is not None and "layers" in inspect.signature(self._stats).parameters
        self._settings = dict(settings or {})
        self._bytes_before, self._last_bytes = bytes_before, 0
        self._last = -1  # the last step logged
        self._layers_at = -1  # the last step whose layers were recorded
        self._unwritten: tuple[int, dict[str, Any]] | None = None
        self._writes = _rank(optimizer) == 0
        self._file: Any = None
        self._closed = False
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._unwritten = None  # what can't go on is not asked how it stands
        self.close()

    def log(self, step: int, *, loss: float | Tensor | None = None, **more: Any) -> dict[str, Any] | None:
        """Record a step that has been taken, if it is its turn.

        Args:
            step: Its number; the first one's is 1.
            loss: Read only if it is recorded: a tensor on the device costs nothing elsewhere.
            more: Numbers or text; None is left out. The report knows ``held_out_loss`` and ``tokens_per_s``.

        Returns:
            What was recorded, or would have been by rank 0; None if it wasn't this step's turn.
        """
        if self._closed:
            raise ValueError(f"this Recorder of {self.folder} is closed; make a new one to go on")
        check_count("step", step)
        if self._last < 0 or step <= self._last:
            self._begin(step)
        self._last = step
        given = {"loss": loss.detach() if isinstance(loss, Tensor) else loss, **more}
        if step % self._every and given.get("held_out_loss") is None:
            self._unwritten = step, given
            return None
        return self._record(step, given)

    def close(self) -> None:
        """Record the last step, if it was not; nothing can be logged afterwards."""
        if self._unwritten is not None:
            self._record(*self._unwritten)
        if self._file is not None:
            self._file.close()
        self._file, self._closed = None, True

    def _record(self, step: int, given: Mapping[str, Any]) -> dict[str, Any]:
        self._unwritten = None
        record: dict[str, Any] = {"optimizer": self.name, "step": step}
        record |= {key: _plain(value) for key, value in given.items() if value is not None}
        looks = self._tells_layers and self._looks_at_layers(step)
        if self._stats is not None:
            # On every rank: what it raises, such as OutOfStepError, all ranks raise here, or none.
            told = self._stats(layers=True) if looks and self._writes else self._stats()
            record = self._told(told) | record
        if self._optimizer.param_groups:
            record.setdefault("lr", _plain(self._optimizer.param_groups[0].get("lr")))
        if self._writes:
            self._file.write(json.dumps(record) + "\n")
        return record

    def _told(self, told: Mapping[str, Any]) -> dict[str, Any]:
        record = {key: told[key] for key in STEP_KEYS if told.get(key) is not None}
        if "bytes_total" in record:
            if self._bytes_before is None:
                self._bytes_before = self._last_bytes if record["bytes_total"] < self._last_bytes else 0
            record["bytes_total"] += self._bytes_before
        if ratio := told.get("residual_over_momentum"):
            record["residual_over_momentum"] = _short(ratio)
        if "layers" in told:
            layers = {key: [_short(_layer_name(x)) for x in row] for key, row in told["layers"].items() if any(row)}
            if len(layers) > 1:  # in the warm-up of 1-bit Adam there is nothing but names
                record["layers"] = layers
        return record

    def _looks_at_layers(self, step: int) -> bool:
        every = self._layers_every
        if every is None:
            turn = step >= self._layers_at + max(1, self._layers_at // LAYERS_GROWTH)
        else:
            turn = every > 0 and step % every == 0
        if turn:
            self._layers_at = step
        return turn

    def _begin(self, step: int) -> None:
        """Drop what is about to be made again, and note that the run goes on from here."""
        self._layers_at = -1 if step <= 1 else step
        if not self._writes:
            return
        if self._file is not None:
            self._file.close()
        last = self._keep(METRICS, lambda r: r.get("step", 0) < step)
        self._last_bytes = (last or {}).get("bytes_total", 0)
        self._keep(STARTS, lambda r: r.get("first_step", 0) < step)
        with (self.folder / STARTS).open("a", encoding="utf-8") as file:
            header = describe(self._optimizer) | {"settings": self._settings}
            file.write(json.dumps({"optimizer": self.name, "first_step": step} | header, default=str) + "\n")
        self._file = (self.folder / METRICS).open("a", buffering=1, encoding="utf-8")

    def _keep(self, name: str, keep: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any] | None:
        """Drop this run's lines that are not to be kept, and torn ones; return its last that is."""
        path, lines, last, dropped = self.folder / name, [], None, False
        if not path.exists():
            return None
        for line, record in read_lines(path):
            mine = record is not None and record.get("optimizer") == self.name
            if record is None or (mine and not keep(record)):
                dropped = True
                continue
            last = record if mine else last
            lines.append(line)
        if dropped or not path.read_bytes().endswith(b"\n"):
            partial = path.with_suffix(".tmp")
            partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            partial.replace(path)  # a crash leaves the old file or the new one
        return last


def scalars(optimizer: torch.optim.Optimizer, prefix: str = "fusedonebit/") -> dict[str, float]:
    """Return the numbers among an optimizer's ``stats()``, for a logger that wants nothing else.

    Weights & Biases: ``wandb.log(scalars(optimizer))``. TensorBoard, with its ``SummaryWriter``:
    ``[writer.add_scalar(*pair, step) for pair in scalars(optimizer).items()]``. Waits for the device, as ``stats()``.

    Args:
        optimizer: One of this package, or of another that has ``stats()``.
        prefix: Of each name; loggers group by what stands before a slash.

    Returns:
        Numbers by name; what is None, text or a list is left out. Where there is a phase, ``compressed`` is 1 or 0.

    Raises:
        TypeError: if ``optimizer`` has no ``stats()``.
    """
    stats: Callable[[], dict[str, Any]] | None = getattr(optimizer, "stats", None)
    if stats is None:
        raise TypeError(f"optimizer must have stats(), as this package's have, got {type(optimizer).__name__}")
    told = stats()
    if "phase" in told:
        told["compressed"] = told["phase"] in COMPRESSED
    numbers = {key: value for key, value in told.items() if isinstance(value, (bool, int, float))}
    return {prefix + key: float(value) for key, value in numbers.items()}


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each line that is not empty and the record in it: None where it is damaged, as a torn last one is.

    A line of more than ``LONGEST_LINE`` bytes is damaged, and yielded without its text.
    """
    with path.open("rb") as file:
        while raw := file.readline(LONGEST_LINE):
            if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                yield "", None
                continue
            line = raw.decode("utf-8", "replace").strip()
            if line:
                yield line, _record(line)


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a run was made with: date, optimizer, its options, versions, where and on how many ranks it runs."""
    stats: dict[str, Any] = getattr(optimizer, "stats", dict)()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    options: Any = getattr(getattr(optimizer, "frame", None), "options", None)
    settings = options.values() if isinstance(options, Options) else {}
    settings |= {name: dataclasses.asdict(x) for name, x in settings.items() if hasattr(x, "__dataclass_fields__")}
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "class": type(optimizer).__name__,
        "repr": repr(optimizer),
        "options": {name: settings[name] for name in options.names()} if settings else {},
        "groups": [
            {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ],
        "parameters": sum(p.numel() for p in params),
        "backend": stats.get("backend"),
        "transport": stats.get("transport"),
        "world_size": stats.get("world_size", dist.get_world_size() if dist.is_initialized() else 1),
        "device": _device(params[0].device) if params else None,
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "triton", "fusedonebit")},
    }


def _device(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device.type} ({name})"


def _version(name: str) -> str | None:
    try:
        return torch.__version__ if name == "torch" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _rank(optimizer: torch.optim.Optimizer) -> int:
    if dist.is_initialized():
        return dist.get_rank()
    ranks = getattr(getattr(optimizer, "frame", None), "ranks", optimizer)
    return getattr(getattr(ranks, "transport", None), "rank", 0)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(x) for x in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    try:
        return float(value)  # a numpy scalar
    except (TypeError, ValueError):
        return str(value)


def _short(value: Any) -> Any:
    """Return a float to 6 significant digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _layer_name(value: Any) -> Any:
    """Return the name that the user gave, where a parameter is told as ``parameter 3 (blocks.0.weight)``."""
    named = re.fullmatch(r"parameter \d+ \((.*)\)", value) if isinstance(value, str) else None
    return named.group(1) if named else value
