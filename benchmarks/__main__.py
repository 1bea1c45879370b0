"""``python -m benchmarks [CASE ...]`` runs the named cases, or all."""

from __future__ import annotations

import sys

from . import bert, compiled, step, wire

CASES = {"wire": wire.run, "step": step.run, "compiled": compiled.run, "bert": bert.run}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    for name in names or CASES:
        CASES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
