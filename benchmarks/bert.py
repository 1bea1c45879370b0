"""BERT-Large's 302 tensors, one rank of 8: what a step launches, sends and keeps, exactly.

What would travel is copied on the device. Kernels are counted as ops: each is one launch, as the tests
of the kernels check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import Lamb, Layerwise
from fusedonebit.triton_kernels.op import OPS

from .loopback import Loopback
from .optimizers import AGAINST_ADAMW, LR, ONEBIT, Maker, Step, against_adamw, check, numel_of, of_shapes
from .registry import Record, Report, case
from .shapes import bert_large
from .timing import Call, one_thread

WORLD_SIZE = 8
COLUMNS = {"optimizer": "<20", "kernels": ">7", "collectives": ">11", "bytes sent": ">12,", "of fp32": ">8.5f"}
COLUMNS |= {"state B/param": ">13.3f"} | {k: v for k, v in AGAINST_ADAMW.items() if k != "optimizer"}


class _Count(TorchDispatchMode):
    """Counts the calls of ops that are kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = function.name().split("::")
        self.calls[name] += namespace == "fusedonebit" and name in OPS and OPS[name].kernel is not None
        return function(*args, **(kwargs or {}))


class _Lamb:
    """The uncompressed baseline; a call is a step."""

    def __init__(self, params: Any) -> None:
        self.optimizer = Lamb(params, lr=LR, process_group=Loopback(WORLD_SIZE))

    def __call__(self) -> None:
        self.optimizer.step()


def shapes_of(numel: int | None) -> tuple[list[tuple[int, ...]], str]:
    """BERT-Large's, or for a try those of as many parameters, in fewer tensors."""
    if numel is None:
        return list(bert_large()), "BERT-Large"
    return [(numel // 2,), (numel // 4,), (7,)], "a toy"


def _step(name: str, params: Sequence[Tensor], **options: Any) -> Step:
    # The next step is the first compressed one, and counts as any other.
    return Step(name, params, steps=1, process_group=Loopback(WORLD_SIZE), **options)


@case("bert", "both")
def bert(report: Report) -> None:
    """BERT-Large, one rank of 8: kernels, collectives, bytes sent and state of a step, exactly; on a GPU its time."""
    shapes, model = shapes_of(report.numel)
    params, n = of_shapes(shapes, report.device), numel_of(shapes)
    peers: dict[str, Maker] = {name: partial(_step, name) for name in ONEBIT}
    title = f"{model}: {n:,} fp32 parameters in {len(shapes)} tensors, one rank of {WORLD_SIZE}, compression stage"
    table = report.table(title, COLUMNS)

    def add(row: Record, call: Call) -> None:
        table.add(**row, **_counted(call, n))

    if report.device.type == "cuda":
        peers |= {
            "Lamb": _Lamb,
            "OneBitLamb, frozen": partial(_step, "OneBitLamb", layerwise=Layerwise(beta3=0.0, adaptive=False)),
        }
        against_adamw(params, peers, report.rounds or 30, add)
    else:  # where each takes half a minute as it is, and `step` has times
        with one_thread():
            for name, make in peers.items():
                add({"optimizer": name}, make(params))
    report.note("bytes of fp32: against a ring all-reduce; state: what the optimizer keeps after the freeze")


def _counted(call: Call, numel: int) -> Record:
    with _Count() as count:
        call()
    check(call)
    stats = call.optimizer.stats()  # type: ignore[attr-defined]
    assert math.isclose(stats["parameters"], numel)
    return {
        "kernels": count.calls.total(),
        "collectives": stats["collectives_step"],
        "bytes sent": stats["bytes_step"],
        "of fp32": stats["bytes_step"] / (8 * numel * (WORLD_SIZE - 1) / WORLD_SIZE),
        "state B/param": stats["state_bytes"] / numel,
    }
