"""What ``make gpu-check`` asks of two GPUs over NCCL, on two real ranks over gloo."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import run_ranks

from benchmarks.gpu import smoke, two_ranks
from benchmarks.registry import Report
from fusedonebit import AdamW

CPU = torch.device("cpu")


def answers(rank: int, world_size: int, names: list[str]) -> list[two_ranks.Answer]:
    return [two_ranks.answer(two_ranks.checks()[name], rank, CPU) for name in names]


class Apart(AdamW):
    """Goes a little further on the second rank."""

    def step(self, closure: None = None) -> None:
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(1 + 1e-3 * torch.distributed.get_rank())


class Still(AdamW):
    """Does nothing."""

    def step(self, closure: None = None) -> None:
        pass


def answers_of(rank: int, world_size: int, make: type[AdamW]) -> two_ranks.Answer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(smoke.OPTIMIZERS, "AdamW", make)
        return two_ranks.answer(partial(two_ranks.agrees, "AdamW"), rank, CPU)


def bytes_of_another(rank: int, world_size: int) -> two_ranks.Answer:
    """Send what nobody expects."""
    real = two_ranks._bytes_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_ranks, "_bytes_of", lambda r, device: real(r, device) + (r == rank))
        return two_ranks.answer(two_ranks.gathers_bytes, rank, CPU)


FAST = ["uint8 all_to_all_single", "uint8 all-gather"]


@pytest.mark.long(but=4)
@pytest.mark.parametrize("name", [name for name in two_ranks.checks() if name not in FAST])
def test_ranks_whose_data_differ_have_the_same_parameters(name):
    found = run_ranks(answers, 2, [*FAST, name])
    assert [[each.error for each in of_rank] for of_rank in found] == [["", "", ""]] * 2, found
    assert found[0][0].told == f"{2 * two_ranks.BYTES} bytes"


def test_every_optimizer_and_every_capturable_graph_is_checked():
    asked = list(two_ranks.checks())
    assert asked[:2] == FAST
    assert len(asked) == 2 + len(smoke.OPTIMIZERS) + len(smoke.CAPTURABLE)


@pytest.mark.parametrize(("make", "why"), [(Apart, "7 of 132457 elements differ"), (Still, "stand still")])
def test_ranks_that_part_or_stand_still_are_seen_by_both(make, why):
    for found in run_ranks(answers_of, 2, make):
        assert found.error == "AssertionError"
        assert why in found.told


def test_bytes_that_are_others_are_seen():
    for found in run_ranks(bytes_of_another, 2):
        assert found.error == "AssertionError"
        assert found.told.endswith("bytes are others")


def test_a_rank_that_ends_takes_no_other_check_along(monkeypatch):
    left = {"no such check": two_ranks.gathers_bytes, "uint8 all-gather": two_ranks.gathers_bytes}
    monkeypatch.setattr(two_ranks, "checks", lambda: left)
    report = Report(CPU, dry_run=True)
    with pytest.raises(AssertionError, match="1 of 2 checks failed"):
        two_ranks.two_ranks(report)
    (table,) = report.tables
    assert [row["result"] for row in table.rows] == ["FAILED: ended on rank 0, ended on rank 1", "passed"]
    assert table.rows[0]["told"] == "with exit status 1"
