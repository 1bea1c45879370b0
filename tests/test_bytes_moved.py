"""Bytes that a step moves and sends: how operations are counted, and that page and picture say what was recorded."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import bytes_moved, bytes_plot, deepspeed_peer, page
from benchmarks.device_bytes import DeviceBytes

N = 1000


def moved(call) -> tuple[int, int]:
    with DeviceBytes() as count:
        call()
    return count.read // 4, count.written // 4


@pytest.mark.parametrize(
    ("name", "call", "read", "written"),
    [
        ("add_", lambda a, b: a.add_(b), 2 * N, N),
        ("add_ to itself", lambda a, b: a.add_(a), N, N),
        ("mul_ by a number", lambda a, b: a.mul_(2.0), N, N),
        ("mul", lambda a, b: a * b, 2 * N, N),
        ("out=", lambda a, b: torch.mul(a, a, out=b), N, N),
        ("copy_", lambda a, b: a.copy_(b), N, N),
        ("zero_", lambda a, b: a.zero_(), 0, N),
        ("zeros_like", lambda a, b: torch.zeros_like(a), 0, N),
        ("empty", lambda a, b: torch.empty(N), 0, 0),
        ("norm", lambda a, b: torch.linalg.norm(a), N, 1),
        ("item", lambda a, b: a[0].item(), 1, 0),
        ("views", lambda a, b: (a[10:].view(10, -1).t(), a.detach(), a.chunk(4)), 0, 0),
        ("a part", lambda a, b: a[: N // 2].add_(b[: N // 2]), N, N // 2),
        ("expanded", lambda a, b: a.view(10, -1).add_(b[:10].view(10, 1).expand(10, N // 10)), N + 10, N),
        ("expanded, copied", lambda a, b: b[:1].expand(N).clone(), 1, N),
        ("bool", lambda a, b: a.bool(), N, N // 4),
        ("set_", lambda a, b: torch.empty(0).set_(a), 0, 0),
        ("cat", lambda a, b: torch.cat([a, b]), 2 * N, 2 * N),
        ("foreach", lambda a, b: torch._foreach_add_([a, a[:10].clone()], [b, b[:10].clone()]), 2 * N + 40, N + 30),
    ],
)
def test_operations_read_inputs_once_and_write_what_changes(name, call, read, written):
    assert moved(lambda: call(torch.ones(N), torch.ones(N)))[0] == read
    with DeviceBytes() as count:
        a, b = torch.ones(N), torch.ones(N)
        before = count.written
        call(a, b)
    assert count.written - before == 4 * written


def test_what_is_paused_is_not_counted():
    with DeviceBytes() as count:
        with count.paused():
            torch.ones(N).add_(1)
        torch.zeros(N)
    assert (count.read, count.written) == (0, 4 * N)


def test_torchs_fused_adamw_moves_28_bytes_and_ddp_copies_16():
    params = bytes_moved.parameters(20_000, 2)
    assert math.isclose(bytes_moved.adamw_bytes(params, bytes_moved.FUSED), 28, rel_tol=0.01)
    assert math.isclose(bytes_moved.ddp_bytes(64), 16, rel_tol=0.01)


@pytest.mark.parametrize(("theirs", "ours", "step"), bytes_moved.PEERS.values())
def test_ours_send_a_bit_each_way_and_move_what_the_audit_says(theirs, ours, step):
    moves = bytes_moved.our_bytes(step)
    assert moves is not None
    assert 20 < moves < 42
    steps = bytes_moved.ROUND if ours == "ZeroOneAdam" else 1
    sent = bytes_moved.our_sent(ours, bytes_moved.parameters(400_000, 2))
    assert 1 <= steps * sent / (2 * 7 / 8 / 8) < 1.05


def test_a_step_that_the_audit_does_not_know_has_no_bytes(monkeypatch):
    assert bytes_moved.our_bytes("1-bit SGD") is None
    monkeypatch.setattr(bytes_moved, "audited", dict)
    assert bytes_moved.our_bytes("MarsitAdam") is None


@pytest.mark.full
@pytest.mark.skipif(not deepspeed_peer.available(), reason=deepspeed_peer.MISSING)
@pytest.mark.parametrize("kind", deepspeed_peer.MODULES)
def test_deepspeeds_step_moves_and_sends_what_was_recorded(kind):
    row = next(row for row in recorded()["tables"][0]["rows"] if row["optimizer"] == f"DeepSpeed {kind}")
    moves, sent = bytes_moved.deepspeed_bytes(kind, bytes_moved.parameters(1 << 20, 2))
    assert math.isclose(moves, row["device B"], rel_tol=0.01)
    assert math.isclose(sent, row["sent B"], rel_tol=0.01)


# ---------------------------------------------------------------- the record, the page and the picture


def recorded() -> dict:
    return page.records()["bytes-moved"]


def test_the_record_has_ours_as_the_audit_counts_them_today():
    rows = {row["optimizer"]: row for row in recorded()["tables"][0]["rows"]}
    assert {"AdamW(fused=True)", *(f"DeepSpeed {kind}" for kind in deepspeed_peer.MODULES)} <= rows.keys()
    for _, ours, step in bytes_moved.PEERS.values():
        assert rows[ours]["device B"] == bytes_moved.our_bytes(step)
    for row in rows.values():
        assert row["x fewer sent"] == bytes_moved.FP32_SENT / row["sent B"]


def test_a_bar_is_as_long_and_says_as_much_as_its_row():
    rows = recorded()["tables"][0]["rows"]
    bars = [bar for group in bytes_plot.bars(recorded()) for bar in group]
    assert [(bar.device, bar.copies, bar.sent) for bar in bars] == [
        (row["device B"], row["DDP's copies B"] or 0.0, row["sent B"]) for row in rows
    ]
    for bar, row in zip(bars, rows, strict=True):
        assert row["optimizer"] in bar.name
        assert abs(float(bar.at_device.split()[0].rstrip(",")) - row["device B"]) <= 0.051
        assert math.isclose(float(bar.at_sent.split(",")[0]), row["sent B"], rel_tol=0.03)


def test_the_picture_shows_the_record_and_is_drawn_again_from_it(tmp_path):
    pytest.importorskip("matplotlib")
    draw, shown = page.PICTURES["bytes-moved"]
    draw(recorded(), tmp_path / "bytes.png")
    for picture in (shown, tmp_path / "bytes.png"):
        assert bytes_plot.told(recorded()).encode("latin-1") in picture.read_bytes()
        assert picture.stat().st_size < 120_000


def test_without_deepspeed_and_some_of_ours_the_rest_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    record = recorded()
    kept = [row for row in record["tables"][0]["rows"] if row["optimizer"] not in ("OneBitLion", "OneBitAdam")]
    record["tables"][0]["rows"] = kept
    bytes_plot.draw(record, tmp_path / "bytes.png")
    assert "OneBitLion" not in bytes_plot.told(record)
