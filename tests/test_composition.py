"""What a reader of an optimizer, and a step of it, goes through: no more than recorded; it may only shrink."""

from __future__ import annotations

import json
import warnings

import pytest

from benchmarks import composition


@pytest.mark.needs_compiler
def test_an_optimizer_and_its_step_go_through_no_more_than_recorded():
    found, remarks = composition.measure()
    recorded = json.loads(composition.RECORD.read_text())
    print(composition.table(found), *remarks, sep="\n")
    for text in composition.better(found, recorded):
        warnings.warn(f"{text}; python -m benchmarks.composition --update writes it down", stacklevel=1)
    worse = composition.worse(found, recorded)
    assert not worse, "\n".join(worse)
