"""Counts, rates, times and sizes as people write and read them: ``340M``, ``4.1Gbps``, ``12.5 ms``, ``1.35 GB``."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_COUNT = re.compile(rf"{_NUMBER}\s*([kmgbt]?)", re.IGNORECASE)
# b is a bit and B a byte; a prefix may have either case, as nobody means millibits.
_BANDWIDTH = re.compile(rf"(?:(\d+)\s*x\s*)?{_NUMBER}\s*([kKmMgGtT]?)(i?)(?:(bit|bits|b)(?:/s|ps)?|(B)(?:/s|ps))")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def parse_count(text: str) -> int:
    """Parse ``340M``, ``1.3B`` or ``340000000`` to a whole number >= 1.

    Raises:
        ArgumentTypeError: for anything else.
    """
    found = _COUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    number = float(found[1]) * 1000 ** _POWERS[found[2].lower()] if found else 0.0
    if not 1 <= number < 1e18:
        raise ArgumentTypeError(f"must be a number of parameters >= 1, as 340M, 1.3B or 340000000, got {text!r}")
    return round(number)


def parse_bandwidth(text: str) -> float:
    """Parse ``4.1Gbps``, ``25Gbit``, ``12.5GB/s`` or ``8x400Gbps`` to bytes per second.

    Raises:
        ArgumentTypeError: for anything else; a unit must be there, as bits and bytes differ by eight.
    """
    found, rate = _BANDWIDTH.fullmatch(text.strip()), 0.0
    if found:
        links, number, prefix, binary, bits, _ = found.groups()
        rate = float(links or 1) * float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()]
        rate = rate / 8 if bits else rate
    if not 0 < rate < 1e18:
        raise ArgumentTypeError(
            "must be a bandwidth > 0 with its unit, in bits as 4.1Gbps, 25Gbit or 8x400Gb/s, or in bytes as 12.5GB/s "
            f"(b is a bit, B a byte), got {text!r}"
        )
    return rate


def duration(seconds: float) -> str:
    """Return three digits and a unit."""
    return scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def size(nbytes: float) -> str:
    """Return three digits and a unit."""
    return scaled(nbytes, {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def bandwidth(bytes_per_second: float) -> str:
    """Return bytes and bits per second."""
    return f"{bytes_per_second / 1e9:,.4g} GB/s ({bytes_per_second * 8e-9:,.4g} Gbit/s)"


def digits(value: float) -> str:
    """Return three digits, more before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scaled(value: float, units: Mapping[str, float]) -> str:
    """Return three digits in the largest unit of which there is one, or else the last."""
    unit = next((unit for unit, one in units.items() if value >= one * 0.9995), [*units][-1])
    return f"{digits(value / units[unit])} {unit}".rstrip()
