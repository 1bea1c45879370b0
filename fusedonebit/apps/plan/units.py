"""Counts and bandwidths as people write them: ``340M``, ``4.1Gbps``, ``12.5GB/s``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_COUNT = re.compile(rf"{_NUMBER}\s*([kKmMgGbBtT]?)")
# b is a bit and B a byte; a prefix may have either case, as nobody means millibits.
_BANDWIDTH = re.compile(rf"(?:(\d+)\s*x\s*)?{_NUMBER}\s*([kKmMgGtT]?)(i?)(?:(bit|bits|b)(?:/s|ps)?|(B)(?:/s|ps))")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def parse_count(text: str) -> int:
    """``340M``, ``1.3B`` or ``340000000`` as a whole number >= 1.

    Raises:
        ArgumentTypeError: for anything else.
    """
    found = _COUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    number = round(float(found[1]) * 1000 ** _POWERS[found[2].lower()]) if found else 0
    if not 1 <= number < 10**18:
        raise ArgumentTypeError(f"must be a number of parameters >= 1, as 340M, 1.3B or 340000000, got {text!r}")
    return number


def parse_bandwidth(text: str) -> float:
    """``4.1Gbps``, ``25Gbit``, ``12.5GB/s`` or ``8x400Gbps`` in bytes per second.

    Raises:
        ArgumentTypeError: for anything else; a unit must be there, as bits and bytes differ by eight.
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    rate = 0.0
    if found:
        links, number, prefix, binary, bits, _ = found.groups()
        rate = int(links or 1) * float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()]
        rate = rate / 8 if bits else rate
    if not 0 < rate < 1e18:
        raise ArgumentTypeError(
            "must be a bandwidth > 0 with its unit, in bits as 4.1Gbps, 25Gbit or 8x400Gb/s, or in bytes as 12.5GB/s "
            f"(b is a bit, B a byte), got {text!r}"
        )
    return rate
