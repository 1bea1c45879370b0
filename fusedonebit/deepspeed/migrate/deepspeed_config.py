"""A DeepSpeed config, and what becomes of each of its keys."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...apps.parsing import InputError, printable

AUTO = "auto"
DEEPEST = 32
MOST_KEYS = 2000
LARGEST = 10**15
"""No number in a config means anything beyond."""


class Fate(Enum):
    """Names what becomes of a key."""

    CARRIED = "carried over"
    FILL_IN = "to fill in"
    EXPLAINED = "explained"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Entry:
    """One key, or a whole block of them."""

    path: str
    fate: Fate
    text: str


FILLED_IN = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1 and adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
"""Values of "auto" that Hugging Face's Trainer fills in, and with what: arguments of TrainingArguments, or a number."""


class Config:
    """The values, and a ledger of what was said about each.

    Args:
        values: The whole config; a bare optimizer block is put into one.
        name: What errors and the ledger call it.

    Raises:
        InputError: for a number that is not finite, or for more than any config has.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = {"optimizer": dict(values)} if "optimizer" not in values and "type" in values else dict(values)
        self.name = name
        self.entries: list[Entry] = []
        self._check("", self.values, 0)
        if len(self.paths()) > MOST_KEYS:
            raise InputError(f"{name} must be a DeepSpeed config, got more than {MOST_KEYS:,} keys")

    def _check(self, path: str, value: Any, depth: int) -> None:
        """Raise InputError for what JSON's grammar does not know or nobody can read."""
        if depth > DEEPEST:
            raise InputError(f"{self.name} must be a DeepSpeed config, but its blocks are nested {depth} deep")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(path, "a finite number", value)
        if isinstance(value, dict):
            for key, inner in value.items():
                self._check(_join(path, key), inner, depth + 1)
        elif isinstance(value, list):
            for inner in value:
                self._check(path, inner, depth + 1)

    # ---------------------------------------------------------------- values

    def get(self, path: str, default: Any = None) -> Any:
        """Find a value; null and what is missing are the default."""
        value: Any = self.values
        for key in path.split("."):
            if not isinstance(value, dict) or value.get(key) is None:
                return default
            value = value[key]
        return value

    def block(self, path: str) -> dict[str, Any]:
        """Find a nested block; empty where there is none, or null."""
        value = self.get(path, {})
        if not isinstance(value, dict):
            raise self.error(path, "a block {...}", value)
        return value

    def number(self, path: str, default: float, most: float = LARGEST, kind: Any = (int, float)) -> Any:
        """Find a number in [0, most], or a whole one."""
        value: Any = self.get(path, default)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value <= most:
            raise self.error(path, f"a {'whole ' if kind is int else ''}number in [0, {most:g}]", value)
        return value

    def given(self, path: str, known: Iterable[str]) -> dict[str, Any]:
        """Copy a block's keys of those that are known, without "auto" that Trainer would fill in."""
        block = self.block(path)
        return {k: block[k] for k in known if k in block and not self.is_filled_in(f"{path}.{k}")}

    def is_filled_in(self, path: str) -> bool:
        """Tell whether Trainer would fill in the value."""
        return self.get(path) == AUTO and path in FILLED_IN

    def has(self, path: str) -> bool:
        """Tell whether the key is there."""
        block, _, key = path.rpartition(".")
        return key in (self.block(block) if block else self.values)

    def shown(self, path: str) -> str:
        """Show a value in a few characters; what is to be filled in are dots."""
        return "..." if self.is_filled_in(path) else _shown(self.get(path))

    def error(self, path: str, expected: str, value: Any, hint: str = "") -> InputError:
        """Make what to raise for a value that does not fit."""
        path = path if len(path) <= 100 else path[:97] + "..."
        return InputError(f"{self.name}: {path} must be {expected}, got {_shown(value)}{hint}")

    # ---------------------------------------------------------------- the ledger

    def carried(self, path: str, text: str) -> None:
        """Note what a key becomes, if it is there."""
        if self.is_filled_in(path):
            self._note(path, Fate.FILL_IN, f'{text}; write {FILLED_IN[path]} of TrainingArguments instead of "auto"')
        elif self.has(path):
            self._note(path, Fate.CARRIED, text)

    def explained(self, path: str, text: str) -> None:
        """Note why a key, or a block, becomes nothing, if it is there."""
        if self.has(path):
            self._note(path, Fate.EXPLAINED, text)

    def _note(self, path: str, fate: Fate, text: str) -> None:
        if not any(entry.path == path for entry in self.entries):
            self.entries.append(Entry(path, fate, text))

    def close(self, known: Iterable[str]) -> None:
        """Note everything that nobody has spoken of as unknown; a name like one of ``known`` is suggested."""
        spoken_of = {entry.path for entry in self.entries}
        for path in self.paths():
            if spoken_of.isdisjoint(_prefixes(path)):
                alike = difflib.get_close_matches(path.rpartition(".")[2], list(known), n=1)
                hint = f"did you mean {alike[0]}?" if alike else "look for a typing error, or take it out of the config"
                self._note(path, Fate.UNKNOWN, f"not a key of DeepSpeed that this knows: {hint}")

    def paths(self) -> list[str]:
        """List the path of every value in the config; a block is its values."""
        return list(_paths(self.values))

    def count(self, fate: Fate) -> int:
        """Count the keys of this fate: the most exact word counts."""
        fates = {entry.path: entry.fate for entry in self.entries}
        return sum(next((fates[p] for p in _prefixes(path) if p in fates), None) is fate for path in self.paths())

    def ledger(self) -> list[str]:
        """Write the fates of all keys, a line each."""
        counts = [f"{self.count(fate)} {fate.value}" for fate in Fate if self.count(fate) or fate is Fate.UNKNOWN]
        lines = [f"All {len(self.paths())} keys of {self.name}: {', '.join(counts)}."]
        for fate in Fate:
            entries = [entry for entry in self.entries if entry.fate is fate]
            lines += [f"{fate.value}:"] * bool(entries)
            lines += [f"    {printable(entry.path)}: {printable(entry.text)}" for entry in entries]
        return lines


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _prefixes(path: str) -> Iterator[str]:
    """Yield the path itself, then its blocks, the innermost first."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _join(path: str, key: str) -> str:
    """Name a key in a block; what could be taken for two keys, or for two lines, can't."""
    shown = printable(key).replace(".", "\\.") or '""'
    return f"{path}.{shown}" if path else shown


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        path = _join(prefix, key)
        if isinstance(value, dict) and value:
            yield from _paths(value, path)
        else:
            yield path
