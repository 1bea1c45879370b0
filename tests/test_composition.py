"""What there is to read, of a step and of the repository, and to install: no more than recorded; it may only shrink."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest

from benchmarks import composition, ratchet, size

IN_A_CLONE = shutil.which("git") is not None and (size.ROOT / ".git").exists()


@pytest.mark.parametrize(
    "counting",
    [
        pytest.param(composition, marks=pytest.mark.needs_compiler),
        pytest.param(size, marks=pytest.mark.skipif(not IN_A_CLONE, reason="git lists the files")),
    ],
    ids=["composition", "size"],
)
def test_there_is_no_more_to_read_than_recorded(counting):
    counted = counting.measure()
    recorded = json.loads(counting.RECORD.read_text())
    print(*counted.lines, sep="\n")
    for text in ratchet.better(counted, recorded):
        warnings.warn(f"{text}; python -m {counting.__name__} --update writes it down", stacklevel=1)
    assert not ratchet.worse(counted, recorded)
