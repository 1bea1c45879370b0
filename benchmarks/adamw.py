"""AdamW on one device with nobody to talk to: ours, with state in each of its kinds, against torch's and 8-bit peers.

Peers are optional: ``pip install torchao bitsandbytes flashoptim``. Of one that is missing, or does not run on the
device, the table says so, and has the bytes that its code tells.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedonebit import AdamW, Numerics

from .audit_kernels import audited
from .optimizers import FOREACH, FUSED, LR, of_shapes
from .registry import Report, Table, case
from .timing import Timing, one_thread, time_by_turns

NUMEL = 1 << 23
TENSORS = (1, 302)
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
COLUMNS = {
    "optimizer": "<32",
    "ms": ">8.2f",
    "x AdamW(fused)": ">15.2f",
    "state B": ">8.2f",
    "held B": ">8.2f",
    "moved B": ">8.2f",
    "limit": ">14",
}
MOST = {"AdamW, fp32": 1.05, "AdamW, bf16": 0.80}
"""Times of torch's fused step on float32 parameters; no more is claimed."""
PEER_ROUNDS = 5
"""Turns of peers, which on a CPU take up to a hundred times as long as torch's step."""

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Ours:
    """A kind of state.

    Attributes:
        audited: By how the byte audit calls it.
        numerics: Its settings.
    """

    audited: str
    numerics: Numerics = field(default_factory=Numerics)


OURS = {
    "AdamW, fp32": Ours(""),
    "AdamW, bf16": Ours(", moments in bf16", Numerics(state="bf16")),
    "AdamW, 8bit": Ours(", moments in codes", Numerics(state="8bit")),
}
WITH_MASTERS = {
    f"AdamW, 8bit, {bits}-bit corrections": Ours(
        f", moments in codes, {bits}-bit corrections", Numerics(state="8bit", master_weights=kept)
    )
    for bits, kept in ((8, "8bit"), (16, "16bit"))
}
"""Those of bfloat16 parameters."""


@dataclass(frozen=True)
class Peer:
    """An optimizer of others whose moments are 8 bits.

    Attributes:
        module, name: Where it is.
        per_moment: Bytes of a moment's element, with its share of scales.
        correction: Bytes of what it keeps for bfloat16 parameters' masters.
        devices: On which it runs.
    """

    module: str
    name: str
    per_moment: float
    correction: int = 0
    devices: tuple[str, ...] = ("cpu", "cuda")

    def state(self, dtype: torch.dtype) -> float:
        """Bytes of state for each parameter."""
        return 2 * self.per_moment + self.correction * (dtype is torch.bfloat16)

    def make(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Construct it; ImportError, or whatever its import raises, where that fails."""
        made: torch.optim.Optimizer = getattr(importlib.import_module(self.module), self.name)(params, lr=LR)
        return made


PEERS = {
    # A float32 scale for 256 elements, both: torchao/optim/subclass_8bit.py, bitsandbytes/optim/optimizer.py.
    "torchao AdamW8bit": Peer("torchao.optim", "AdamW8bit", 1 + 4 / 256),
    "bitsandbytes AdamW8bit": Peer("bitsandbytes.optim", "AdamW8bit", 1 + 4 / 256),
    # A float16 scale for 32 elements, and 8 bits of correction: flashoptim/optimizers.py, Triton alone.
    "FlashOptim FlashAdamW": Peer("flashoptim", "FlashAdamW", 1 + 2 / 32, 1, ("cuda",)),
}


def torchs() -> dict[str, Make]:
    """Torch's two."""
    return {
        FUSED: lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
        FOREACH: lambda params: torch.optim.AdamW(params, lr=LR, foreach=True),
    }


def ours(dtype: torch.dtype) -> dict[str, Ours]:
    """Ours for parameters of a dtype."""
    return OURS | (WITH_MASTERS if dtype is torch.bfloat16 else {})


def moved(name: str, dtype: torch.dtype) -> float | None:
    """Bytes that a step moves for each parameter: ours from compiled code, others' by their operands, once each."""
    if name == FUSED:  # reads g, x, m and v, and writes all but g: moments have the parameter's dtype
        return 7.0 * dtype.itemsize
    if name in PEERS:
        return 3.0 * dtype.itemsize + 2 * PEERS[name].state(dtype)
    if name == FOREACH:
        return None
    of_dtype = "" if dtype is torch.float32 else f", {DTYPES[dtype]}"
    return audited()[f"adam_update, alone{of_dtype}{ours(dtype)[name].audited}"]


def held(optimizer: torch.optim.Optimizer, numel: int) -> float:
    """Bytes of state for each parameter, as it lies in memory."""
    if isinstance(optimizer, AdamW):
        return float(optimizer.stats()["state_bytes"]) / numel
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            for tensor in _plain(value) if isinstance(value, Tensor) else ():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) / numel


def _plain(tensor: Tensor) -> list[Tensor]:
    """The tensors of which a subclass is made; itself if it is none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _plain(getattr(tensor, name))]


def usable(report: Report, make_params: Callable[[], list[Tensor]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Peers that take a step here, and of the others why not."""
    made, refused = {}, {}
    for name, peer in PEERS.items():
        if report.device.type not in peer.devices:
            refused[name] = f"{' and '.join(peer.devices)} alone"
            continue
        try:
            optimizer = peer.make(make_params())
            optimizer.step()
        except ImportError:
            refused[name] = "not installed"
        except Exception as error:  # whatever theirs raises, ours shall be timed
            refused[name] = f"fails: {type(error).__name__}"
        else:
            made[name] = optimizer
    return made, refused


@case("adamw", "both")
def adamw(report: Report) -> None:
    """Uncompressed AdamW, alone: torch's, ours in all kinds of state, and 8-bit ones of others, one thread."""
    numel = report.numel or NUMEL
    with one_thread():
        for dtype, name in DTYPES.items():
            for tensors in TENSORS if report.device.type == "cpu" else TENSORS[-1:]:  # a GPU is lent for minutes
                table = report.table(f"{numel:,} {name} parameters in {tensors} tensors", COLUMNS)
                _fill(report, table, dtype, [(max(1, numel // tensors),)] * tensors)
    report.note(
        "torch's moments have the parameters' dtype; bytes that ours move are from code compiled for sm_90, those of "
        "others are their operands, once each; held: parameters, gradients and state. Peers that did not run: bytes as "
        "their code has them. torchao has moments in 8 bits where a tensor is a multiple of 256 elements"
    )


def _fill(report: Report, table: Table, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> None:
    """Time torch's and ours by turns, then torch's and peers', and add a row of each."""
    make_params = partial(of_shapes, shapes, report.device, dtype)
    own = {name: partial(AdamW, lr=LR, numerics=kind.numerics) for name, kind in ours(dtype).items()}
    made: dict[str, Any] = {name: make(make_params()) for name, make in (torchs() | own).items()}
    rounds = report.rounds or 31
    _rows(report, table, made, _timed(report, made, rounds), dtype, shapes)
    del made
    peers, refused = usable(report, make_params)
    if peers:
        fused = {FUSED: torchs()[FUSED](make_params())}
        timed = _timed(report, fused | peers, min(rounds, PEER_ROUNDS))
        _rows(report, table, peers, timed, dtype, shapes)
    for name, reason in refused.items():
        state = PEERS[name].state(dtype)
        bytes_of = {"state B": state, "held B": state + 2 * dtype.itemsize, "moved B": moved(name, dtype)}
        table.add(optimizer=name, **{"x AdamW(fused)": None}, **bytes_of, limit=reason)


def _timed(report: Report, made: Mapping[str, Any], rounds: int) -> dict[str, Timing]:
    return time_by_turns({name: optimizer.step for name, optimizer in made.items()}, report.device, rounds)


def _rows(
    report: Report,
    table: Table,
    made: Mapping[str, Any],
    timed: Mapping[str, Timing],
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    numel = sum(shape[0] for shape in shapes)
    for name, optimizer in made.items():
        timing, state = timed[name], held(optimizer, numel)
        times = timing.median / timed[FUSED].median
        row = {"optimizer": name, "ms": timing.median, "low": timing.low, "high": timing.high}
        most = MOST.get(name) if dtype is torch.float32 else None
        ratio = {"x AdamW(fused)": times, "limit": report.limit(times, at_most=most)}
        bytes_of = {"state B": state, "held B": state + 2 * dtype.itemsize, "moved B": moved(name, dtype)}
        table.add(**row, **ratio, **bytes_of)
