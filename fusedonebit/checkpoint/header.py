"""What a checkpoint's header may say: one rule per key, whichever optimizer has written it.

Which keys must be there each class says (``_header_keys``), and which stages it knows (``_phases``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..core.optimizer import DistributedOptimizer

_LIMIT = 2**63


class Rule(NamedTuple):
    """A check of a value, and what it asks for."""

    holds: Callable[[Any], bool]
    expected: str


def _is_int(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def _is_number(value: Any) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value))


def _or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.expected}, or null")


def _list_of(rule: Rule, length: int | None = None) -> Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(rule.holds, value))

    return Rule(holds, f"a list of {rule.expected}" if length is None else f"a list of {length} times {rule.expected}")


def _one_or_list_of(rule: Rule) -> Rule:
    return Rule(lambda value: rule.holds(value) or _list_of(rule).holds(value), f"{rule.expected}, or one per tensor")


_INT = Rule(_is_int, "an int")
_COUNT = Rule(lambda value: _is_int(value) and value >= 0, "an int >= 0")
_POSITIVE = Rule(lambda value: _is_int(value) and value >= 1, "an int >= 1")
_AMOUNT = Rule(lambda value: _is_number(value) and value >= 0, "a finite number >= 0")
_FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
_TEXT = Rule(lambda value: isinstance(value, str), "a string")
_TABLE = Rule(lambda value: isinstance(value, dict), "a table")
_PHASES = ("uncompressed", "warmup", "compression", "local", "one-bit")
_STEPS = Rule(lambda value: value == math.inf or (_is_number(value) and value >= 0), "a number >= 0")  # inf: corrected
_INT32 = Rule(lambda value: _is_int(value) and -(2**31) <= value < 2**32, "an int of 32 bits")

LINES = ("shards", "block_size", "line", "strides", "masks", "options", "digests")
"""What a header must say of lines, whichever optimizer has them, besides how they are cut."""
CUT = ("buckets", "inside")

RULES: dict[str, Rule] = {
    "format": _INT,
    "algorithm": _TEXT,
    "trained": _list_of(_COUNT),
    "phase": Rule(lambda value: value in _PHASES, f"one of {', '.join(_PHASES)}"),
    "lines": _FLAG,
    "updates": _COUNT,
    "skipped": _COUNT,
    "steps": _COUNT,
    "world_size": _POSITIVE,
    "rank": _COUNT,
    "shards": _POSITIVE,
    "block_size": _POSITIVE,
    "line": _POSITIVE,
    "strides": _list_of(_list_of(_COUNT)),
    "masks": _TABLE,
    "options": _TABLE,
    "bytes_total": _COUNT,
    "checksums": Rule(
        lambda value: isinstance(value, dict) and all(_list_of(_or_none(_COUNT)).holds(v) for v in value.values()),
        "a table of lists of ints",
    ),
    "names": _list_of(_TEXT),
    "between": _list_of(
        Rule(
            lambda v: isinstance(v, list) and len(v) == 5 and _TEXT.holds(v[0]) and all(map(_COUNT.holds, v[1:])),
            "sums",
        )
    ),
    # of a compression stage
    "settled": _TABLE,
    "digests": Rule(lambda value: _list_of(_INT32).holds(value) and bool(value), "a list of ints of 32 bits"),
    "buckets": _POSITIVE,
    "inside": _POSITIVE,
    "variance_step": _one_or_list_of(_STEPS),
    "freeze_step": _or_none(_COUNT),
    "freeze_due": _or_none(_COUNT),
    "rewarms": _COUNT,
    "vetoed": _COUNT,
    "veto_at": _or_none(_COUNT),
    "guard": _or_none(_list_of(_STEPS, 2)),
    "dead_tensors": _list_of(_COUNT),
    "dead_coordinates": _COUNT,
    "auto": _or_none(_TABLE),
    "unit_is_known": _FLAG,
    "started": _FLAG,
    # of rounds
    "rounds": _COUNT,
    "counted": _COUNT,
    "digest": _INT32,
    "local": _COUNT,
    "flags": _INT,
    "tag": _INT,
    # of 0/1 Adam
    "done": _list_of(_COUNT, 4),
    "uncounted": _COUNT,
    "round": Rule(
        lambda v: isinstance(v, list) and len(v) == 2 and _FLAG.holds(v[0]) and _POSITIVE.holds(v[1]),
        "a list of true or false and an int >= 1",
    ),
    "floats": _FLAG,
    "entered": _one_or_list_of(_AMOUNT),
    "summed": _one_or_list_of(_AMOUNT),
    "missed": _list_of(_COUNT),
    "pending": _INT,
    "was_frozen": _FLAG,
    "variance_betas": _or_none(_list_of(_AMOUNT)),
}

AUTO: dict[str, Rule] = {
    "norms": _list_of(_AMOUNT),
    "seen": _COUNT,
    "fired": _FLAG,
    "pending": Rule(lambda value: isinstance(value, list), "a list"),
}


def check(optimizer: DistributedOptimizer, header: Mapping[str, Any], own: bool) -> None:
    """Raises ValueError for the first thing that a header can't say.

    Args:
        optimizer: That is to go on from it.
        header: Of any optimizer of this package.
        own: Whether this optimizer's class has written it, so that all must be there that it reads.
    """
    must: tuple[str, ...] = ("phase", "updates", "skipped")
    trains = bool(len(optimizer._list))  # else there are no lines, whatever the stage
    if own and (header.get("lines", header.get("phase") == "compression") or not any(optimizer._phases.values())):
        must += optimizer._header_keys
    for key in must:
        if key not in header:
            raise ValueError(f"the checkpoint's header is damaged: it lacks {key}; load another checkpoint")
    _check_each(header, RULES, "")
    if header.get("auto"):
        _check_each(header["auto"], AUTO, "auto.")
    if not own:
        return
    if header.get("trained") and "step" not in header.get("names", ["step"]):
        raise ValueError(
            f"the checkpoint's header is damaged: names must have step, got {header['names']}; load another checkpoint"
        )
    count = len(optimizer._list)
    for key in ("dead_tensors", "missed"):
        if any(index >= count for index in header.get(key, [])):
            raise ValueError(
                f"the checkpoint's header is damaged: {key} must be below {count}, got {header[key]}; load another "
                "checkpoint"
            )
    for key in ("variance_step", "entered", "summed"):
        told = header.get(key)
        if isinstance(told, list) and len(told) != count:
            raise ValueError(
                f"the checkpoint's header is damaged: {key} must have {count} values, got {len(told)}; load another "
                "checkpoint"
            )
    betas, groups = header.get("variance_betas"), len(optimizer.param_groups)
    if betas is not None and len(betas) != groups:
        raise ValueError(
            f"the checkpoint's header is damaged: variance_betas must have {groups} values, got {betas}; load another "
            "checkpoint"
        )
    phases = optimizer._phases
    lines = trains and phases.get(header["phase"], False)
    if header["phase"] not in phases or header.get("lines", lines) != lines:
        raise ValueError(
            f"the checkpoint's header is damaged: phase must be one of {', '.join(phases)}, got {header['phase']!r} "
            f"with lines={header.get('lines')}; load another checkpoint"
        )


def _check_each(header: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str) -> None:
    for key, rule in rules.items():
        if key in header and not rule.holds(header[key]):
            raise ValueError(
                f"the checkpoint's header is damaged: {prefix}{key} must be {rule.expected}, got {header[key]!r}; "
                "load another checkpoint"
            )
