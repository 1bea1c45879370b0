"""A DeepSpeed config, and what becomes of each of its keys."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

AUTO = "auto"


class InputError(ValueError):
    """The config can't be read or makes no sense; one line that says why."""


class Fate(Enum):
    """What becomes of a key."""

    CARRIED = "carried over"
    FILL_IN = 'carried over as a constant to fill in, because it is "auto"'
    EXPLAINED = "not carried over, and why"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Entry:
    """One key, or a whole block of them."""

    path: str
    fate: Fate
    text: str


@dataclass(frozen=True)
class Constant:
    """What stands for a value of "auto", which Hugging Face's Trainer fills in from its own arguments."""

    name: str
    default: str
    argument: str


FILLED_IN = {
    "train_micro_batch_size_per_gpu": Constant("MICRO_BATCH_SIZE", "8", "per_device_train_batch_size"),
    "gradient_accumulation_steps": Constant("ACCUMULATION_STEPS", "1", "gradient_accumulation_steps"),
    "gradient_clipping": Constant("MAX_GRAD_NORM", "1.0", "max_grad_norm"),
    "optimizer.params.lr": Constant("LR", "5e-5", "learning_rate"),
    "optimizer.params.betas": Constant("BETAS", "(0.9, 0.999)", "adam_beta1 and adam_beta2"),
    "optimizer.params.eps": Constant("EPS", "1e-8", "adam_epsilon"),
    "optimizer.params.weight_decay": Constant("WEIGHT_DECAY", "0.0", "weight_decay"),
    "scheduler.params.warmup_min_lr": Constant("WARMUP_MIN_LR", "0.0", "nothing: it is 0"),
    "scheduler.params.warmup_max_lr": Constant("LR", "5e-5", "learning_rate"),
    "scheduler.params.warmup_num_steps": Constant("WARMUP_STEPS", "1000", "warmup_steps"),
    "scheduler.params.total_num_steps": Constant("TOTAL_STEPS", "10000", "max_steps"),
}


class Config:
    """The values, and a ledger of what was said about each.

    Args:
        values: The whole config; a bare optimizer block is put into one.
        name: What errors and comments call it.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = {"optimizer": dict(values)} if "optimizer" not in values and "type" in values else dict(values)
        self.name = name
        self.entries: list[Entry] = []
        self.constants: list[Constant] = []

    # ---------------------------------------------------------------- values

    def block(self, path: str) -> dict[str, Any]:
        """A nested block; empty where there is none, or null."""
        value = self._find(path)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(path, "a block {...}", value)
        return value

    def value(self, path: str, kind: str, default: Any = None) -> Any:
        """A value of a kind (a key of ``KINDS``); null and what is missing are the default; "auto" stays so."""
        value = self._find(path)
        if value is None:
            return default
        if value == AUTO and path in FILLED_IN:
            return AUTO
        fits, expected = KINDS[kind]
        if not fits(value):
            raise self.error(path, expected, value)
        return value

    def source(self, path: str, kind: str, default: Any = None) -> str:
        """The same as Python source, "auto" as the name of a constant at the top."""
        value = self.value(path, kind, default)
        if value != AUTO:
            return repr(tuple(value)) if isinstance(value, list) else repr(value)
        constant = FILLED_IN[path]
        if constant not in self.constants:
            self.constants.append(constant)
        return constant.name

    def has(self, path: str) -> bool:
        """Whether the key is there."""
        block, _, key = path.rpartition(".")
        return key in (self.block(block) if block else self.values)

    def error(self, path: str, expected: str, value: Any) -> InputError:
        """What to raise for a value that does not fit."""
        auto = ' (no argument of Hugging Face\'s Trainer fills that "auto" in)' if value == AUTO else ""
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return InputError(f"{self.name}: {path} must be {expected}, got {shown}{auto}")

    def _find(self, path: str) -> Any:
        value: Any = self.values
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value

    # ---------------------------------------------------------------- the ledger

    def carried(self, path: str, text: str) -> None:
        """Notes that a key has gone into the script, if it is there."""
        if not self.has(path):
            return
        if self._find(path) == AUTO and path in FILLED_IN:
            constant = FILLED_IN[path]
            text = f'"auto": set {constant.name}, which was TrainingArguments\' {constant.argument}; {text}'
            self._note(path, Fate.FILL_IN, text)
        else:
            self._note(path, Fate.CARRIED, text)

    def explained(self, path: str, text: str, again: bool = False) -> None:
        """Notes why a key, or a block, has not, if it is there; ``again``: whatever was said before."""
        if self.has(path):
            self.entries = [entry for entry in self.entries if not again or entry.path != path]
            self._note(path, Fate.EXPLAINED, text)

    def _note(self, path: str, fate: Fate, text: str) -> None:
        if not any(entry.path == path for entry in self.entries):
            self.entries.append(Entry(path, fate, text))

    def close(self, known: Iterable[str]) -> None:
        """Notes everything that nobody has spoken of as unknown; a name like one of ``known`` is suggested."""
        spoken_of = {entry.path for entry in self.entries}
        for path in self.paths():
            parts = path.split(".")
            if not any(".".join(parts[: i + 1]) in spoken_of for i in range(len(parts))):
                alike = difflib.get_close_matches(parts[-1], list(known), n=1)
                hint = f"did you mean {alike[0]}?" if alike else "look for a typing error, or take it out of the config"
                text = f"not a key of DeepSpeed that this knows: {hint}"
                self._note(path, Fate.UNKNOWN, text)

    def paths(self) -> list[str]:
        """The path of every value in the config; a block is its values."""
        return list(_paths(self.values))

    def count(self, fate: Fate) -> int:
        """How many of those keys have this fate."""
        fates = {entry.path: entry.fate for entry in self.entries}
        return sum(next((fates[p] for p in _prefixes(path) if p in fates), None) is fate for path in self.paths())


def _prefixes(path: str) -> Iterator[str]:
    """The path itself, then its blocks, the innermost first: the most exact word counts."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


LARGEST = 10**15
"""No whole number in a config means anything beyond."""


def _number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, float) and math.isfinite(value)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _in_unit(value: Any) -> bool:
    return _number(value) and 0 <= value < 1


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "flag or auto": (lambda value: isinstance(value, bool) or value == AUTO, 'true, false or "auto"'),
    "text": (lambda value: isinstance(value, str), "a string"),
    "number": (_number, "a number"),
    "number >= 0": (lambda value: _number(value) and value >= 0, "a number >= 0"),
    "number > 0": (lambda value: _number(value) and value > 0, "a number > 0"),
    "number in [0, 1)": (_in_unit, "a number in [0, 1)"),
    "whole >= 0": (lambda value: _whole(value, 0), "a whole number >= 0"),
    "whole >= 1": (lambda value: _whole(value, 1), "a whole number >= 1"),
    "whole >= 2": (lambda value: _whole(value, 2), "a whole number >= 2"),
    "betas": (
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(_in_unit, value)),
        "a list of two numbers in [0, 1)",
    ),
}


def read(path: str) -> Config:
    """Reads a config from a file; ``-`` is the standard input.

    Raises:
        InputError: if there is none, or it is no JSON object.
    """
    name = "the standard input" if path == "-" else path
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{name} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not JSON: it is not text in UTF-8") from error
    try:
        values = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}{HINT}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name} is not JSON that can be read: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{name} must hold a JSON object, DeepSpeed's config, got {type(values).__name__}")
    return Config(values, name)


HINT = "; comments, trailing commas and keys without quotes, which DeepSpeed's hjson accepts, have to go"


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the key "{twice}" stands twice in one block; keep one')
    return values
