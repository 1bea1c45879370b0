"""Numbers that may only shrink: each beside its goal, and compared with what is recorded of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Numbers = dict[str, int]
Found = dict[str, Numbers]


class Counted(NamedTuple):
    """Is what was counted: numbers by part and key, what to print, and what each key is called.

    Attributes:
        found: Numbers by key, of each part.
        lines: A table, and remarks.
        names: What a key is called.
        units: Of keys that are recorded in whole units of so many, so that not every repair is one too many.
    """

    found: Found
    lines: Sequence[str]
    names: Mapping[str, str]
    units: Mapping[str, int]


def differing(counted: Counted, recorded: Found) -> Iterator[tuple[str, int, int]]:
    """Yield names of numbers, with what was found and what is recorded."""
    for part, numbers in counted.found.items():
        for key, number in numbers.items():
            yield f"{part}, {counted.names[key]} ({key})", number, recorded[part][key]


def worse(counted: Counted, recorded: Found) -> list[str]:
    lines = differing(counted, recorded)
    return [f"{name}: {now:,}, at most {then:,} recorded" for name, now, then in lines if now > then]


def better(counted: Counted, recorded: Found) -> list[str]:
    """Say what is better by more than a twentieth."""
    lines = differing(counted, recorded)
    return [f"{name}: {now:,}, {then:,} recorded" for name, now, then in lines if now < 0.95 * then]


def record(counted: Counted, file: Path) -> None:
    """Write it down."""
    found = {
        part: {key: number + -number % counted.units.get(key, 1) for key, number in numbers.items()}
        for part, numbers in counted.found.items()
    }
    file.write_text(json.dumps(found, indent=1) + "\n")


def main(description: str, measure: Callable[[], Counted], file: Path) -> None:
    """Print what is counted, and exit with 1 where a number is worse than the record has it, or write that anew."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--update", action="store_true", help=f"write {file.name}")
    update = parser.parse_args().update
    counted = measure()
    print(*counted.lines, sep="\n")
    if update:
        record(counted, file)
        return
    recorded = json.loads(file.read_text())
    for text in better(counted, recorded):
        print(f"better: {text}; --update writes it down")
    for text in (bad := worse(counted, recorded)):
        print(f"WORSE: {text}")
    sys.exit(bool(bad))
