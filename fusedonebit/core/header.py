"""Rules for a checkpoint's header, one per key, declared by the classes that read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

KEY = "fusedonebit"
"""Of the first group of a checkpoint, under which its header is."""

FORMAT = 2
"""Of checkpoints."""

_LIMIT = 2**63


class Rule(NamedTuple):
    """A check of a value, and what it asks for."""

    holds: Callable[[Any], bool]
    expected: str


def _is_int(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def _is_number(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value))


def or_none(rule: Rule) -> Rule:
    """Allow null besides."""
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.expected}, or null")


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """Ask for a list."""

    def holds(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(rule.holds, value))

    return Rule(holds, f"a list of {rule.expected}" if length is None else f"a list of {length} times {rule.expected}")


def _one_or_list_of(rule: Rule) -> Rule:
    return Rule(lambda value: rule.holds(value) or list_of(rule).holds(value), f"{rule.expected}, or one per tensor")


INT = Rule(_is_int, "an int")
COUNT = Rule(lambda value: _is_int(value) and value >= 0, "an int >= 0")
POSITIVE = Rule(lambda value: _is_int(value) and value >= 1, "an int >= 1")
AMOUNT = Rule(lambda value: _is_number(value) and value >= 0, "a finite number >= 0")
FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
TABLE = Rule(lambda value: isinstance(value, dict), "a table")
# Infinite: of a variance that is corrected for its start at 0.
STEPS = Rule(lambda value: value == math.inf or (_is_number(value) and value >= 0), "a number >= 0")
STEPS_OF_EACH, AMOUNT_OF_EACH = _one_or_list_of(STEPS), _one_or_list_of(AMOUNT)
INT32 = Rule(lambda value: _is_int(value) and -(2**31) <= value < 2**32, "an int of 32 bits")
_TEXT = Rule(lambda value: isinstance(value, str), "a string")
_SUMS = Rule(
    lambda v: isinstance(v, list) and len(v) == 5 and _TEXT.holds(v[0]) and all(map(COUNT.holds, v[1:])), "sums"
)
_COLUMNS = Rule(
    lambda value: isinstance(value, dict) and all(list_of(or_none(COUNT)).holds(v) for v in value.values()),
    "a table of lists of ints",
)


class Field(NamedTuple):
    """One key of an optimizer's header.

    ``required``: whether a checkpoint of its own must have it. ``one_per``: of a list, what it has a value for
    ("updates": a tensor, whose updates it counts), or "index": its values are indices of tensors.
    """

    rule: Rule
    required: bool = True
    one_per: Literal["", "tensor", "updates", "group", "index"] = ""


Fields = Mapping[str, Field]

BASE: dict[str, Rule] = {
    "format": INT,
    "algorithm": _TEXT,
    "trained": list_of(COUNT),
    "phase": _TEXT,
    "lines": FLAG,
    "updates": COUNT,
    "skipped": COUNT,
    "steps": COUNT,
    "begun": FLAG,
    "world_size": POSITIVE,
    "rank": COUNT,
    "shards": POSITIVE,
    "block_size": POSITIVE,
    "line": POSITIVE,
    "strides": list_of(list_of(COUNT)),
    "masks": TABLE,
    "options": TABLE,
    "bytes_total": COUNT,
    "buckets": POSITIVE,
    "inside": POSITIVE,
    "checksums": _COLUMNS,
    "names": list_of(_TEXT),
    "between": list_of(_SUMS),
}
"""What any checkpoint may have."""

_COMPRESSED_KEYS = ("shards", "block_size", "line", "strides", "masks", "options", "buckets", "inside")

COMPRESSED: Fields = {
    **{key: Field(BASE[key]) for key in _COMPRESSED_KEYS},
    "digests": Field(Rule(lambda value: list_of(INT32).holds(value) and bool(value), "a list of ints of 32 bits")),
}
"""What the checkpoint of a compressed stage has."""


def is_compressed(header: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of a compressed stage; before it said so, that was "compression"."""
    return bool(header.get("lines", header.get("phase") == "compression"))


def check_each(header: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str) -> None:
    """Raise ValueError for the first value that breaks its key's rule."""
    for key, rule in rules.items():
        if key in header and not rule.holds(header[key]):
            damaged(prefix + key, f"be {rule.expected}", repr(header[key]))


def check_fields(
    header: Mapping[str, Any], fields: Fields, phases: Mapping[Any, bool], sizes: tuple[int, int], own: bool
) -> None:
    """Raise ValueError for the first thing that a header can't say to an algorithm with these fields and stages.

    ``sizes`` are the numbers of parameters and groups. One of its ``own`` must have all that it reads.
    """
    if header.get("format", FORMAT) != FORMAT:
        raise ValueError(f"checkpoint format must be {FORMAT}, got {header['format']}; use the version that wrote it")
    must = ["phase", "updates", "skipped"]
    if own and (is_compressed(header) or not any(phases.values())):
        must += [key for key, field in fields.items() if field.required]
    for key in must:
        if key not in header:
            raise ValueError(f"the checkpoint's header is damaged: it lacks {key}; load another checkpoint")
    check_each(header, BASE | {key: field.rule for key, field in fields.items()}, "")
    if not own:
        return
    tensors, groups = sizes
    if header.get("trained") and "step" not in header.get("names", ["step"]):
        damaged("names", "have step", header["names"])
    for key, field in fields.items():
        told = header.get(key)
        if not field.one_per or not isinstance(told, list):
            continue
        if field.one_per == "index" and any(index >= tensors for index in told):
            damaged(key, f"be below {tensors}", told)
        if field.one_per != "index" and len(told) != (expected := groups if field.one_per == "group" else tensors):
            damaged(key, f"have {expected} values", told)
    compressed = tensors > 0 and phases.get(header["phase"], False)  # where nothing trains there are none
    if header["phase"] not in phases or header.get("lines", compressed) != compressed:
        got = f"{header['phase']!r} with lines={header.get('lines')}"
        damaged("phase", f"be one of {', '.join(phases)}", got)


def damaged(key: str, must: str, got: object) -> None:
    """Raise ValueError for a value that a header can't have."""
    raise ValueError(f"the checkpoint's header is damaged: {key} must {must}, got {got}; load another checkpoint")


def one_or_each(values: Tensor) -> float | list[float]:
    """Tell the number of each tensor, float64 [tensors]: one where all are equal. Waits for the device."""
    listed = values.tolist()
    return listed[0] if len(set(listed)) == 1 else listed


def each(told: float | Sequence[float], like: Tensor) -> Tensor:
    """Expand what ``one_or_each`` has returned to a tensor of the shape, dtype and device of ``like``."""
    return torch.as_tensor(told, dtype=like.dtype, device=like.device).expand_as(like).clone()
