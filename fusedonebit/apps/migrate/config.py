"""A DeepSpeed config, and what becomes of each of its keys."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...errors import printable

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

    Raises:
        InputError: for a number that is not finite, or for more than any config has.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = {"optimizer": dict(values)} if "optimizer" not in values and "type" in values else dict(values)
        self.name = name
        self.entries: list[Entry] = []
        self.constants: list[Constant] = []
        self._check("", self.values, 0)
        if len(self.paths()) > MOST_KEYS:
            raise InputError(f"{name} must be a DeepSpeed config, got more than {MOST_KEYS:,} keys")

    def _check(self, path: str, value: Any, depth: int) -> None:
        """Raises InputError for what JSON's grammar does not know or nobody can read."""
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
            return literal(value)
        constant = FILLED_IN[path]
        if constant not in self.constants:
            self.constants.append(constant)
        return constant.name

    def has(self, path: str) -> bool:
        """Whether the key is there."""
        block, _, key = path.rpartition(".")
        return key in (self.block(block) if block else self.values)

    def error(self, path: str, expected: str, value: Any, hint: str = "") -> InputError:
        """What to raise for a value that does not fit."""
        auto = ' (no argument of Hugging Face\'s Trainer fills that "auto" in)' if value == AUTO else ""
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        path = path if len(path) <= 100 else path[:97] + "..."
        return InputError(f"{self.name}: {path} must be {expected}, got {shown}{auto}{hint}")

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
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _join(path: str, key: str) -> str:
    """The path of a key in a block; what could be taken for two keys, or for two lines, can't."""
    shown = printable(key).replace(".", "\\.") or '""'
    return f"{path}.{shown}" if path else shown


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        path = _join(prefix, key)
        if isinstance(value, dict) and value:
            yield from _paths(value, path)
        else:
            yield path


def literal(value: Any) -> str:
    """Python source of a number, a flag, None, or a short list of them: nothing else gets into a script.

    Raises:
        TypeError: for anything else, which is a fault of this package.
    """
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_LIST:
        inner = ", ".join(map(literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if value is None or isinstance(value, bool) or _number(value):
        return repr(value)
    raise TypeError(f"no source for a {type(value).__name__}")


DEEPEST = 32
MOST_KEYS = 2000
LONGEST_LIST = 64
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
    "number in [0, 1]": (lambda value: _number(value) and 0 <= value <= 1, "a number in [0, 1]"),
    "loss scale": (lambda value: _number(value) and 0 <= value <= 2.0**127, "a number in [0, 2**127]"),
    "power of two": (lambda value: _whole(value, 0) and value <= 127, "a whole number in [0, 127]"),
    "whole >= 0": (lambda value: _whole(value, 0), "a whole number >= 0"),
    "whole >= 1": (lambda value: _whole(value, 1), "a whole number >= 1"),
    "whole >= 2": (lambda value: _whole(value, 2), "a whole number >= 2"),
    "wholes": (
        lambda value: isinstance(value, list) and 0 < len(value) <= LONGEST_LIST and all(_whole(x, 0) for x in value),
        f"a list of at most {LONGEST_LIST} whole numbers >= 0",
    ),
    "betas": (
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(_in_unit, value)),
        "a list of two numbers in [0, 1)",
    ),
}
