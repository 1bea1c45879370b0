"""Small models, whose steps are bound by launches: with and without one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedonebit import Wire

from .optimizers import FUSED, LR, ONEBIT, Step, check, of_shapes
from .registry import TIMES, Report, case, times
from .shapes import MODELS, sizes
from .timing import Call, synchronise, time_by_turns, until_idle

SMALL = ("small MLP", "ResNet-50", "GPT-2 small")
STEPS_AT_A_TIME = 10


def captured(call: Call, device: torch.device) -> Call:
    """The step as one CUDA graph; a call replays it."""
    synchronise(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _steps(shapes: Sequence[tuple[int, ...]], device: torch.device) -> dict[str, Call]:
    def params() -> list[Tensor]:
        return of_shapes(shapes, device)

    cuda = device.type == "cuda"
    made: dict[str, Call] = {FUSED: torch.optim.AdamW(params(), lr=LR, fused=True, capturable=cuda).step}
    made |= {name: Step(name, params(), wire=Wire(capturable=True)) for name in ONEBIT}
    for call in made.values():
        for _ in range(3):
            call()
    return made


@case("graphs", "cuda")
def graphs(report: Report) -> None:
    """Launch-bound small models, world size 1: what a loop of steps takes, with and without one CUDA graph."""
    device = report.device
    for model in SMALL:
        shapes = MODELS[model]()
        if report.numel and sum(sizes(shapes)) > report.numel:
            continue
        steps = _steps(shapes, device)
        peers = dict(steps)
        if device.type == "cuda":
            peers |= {f"{name}, one graph": captured(call, device) for name, call in _steps(shapes, device).items()}
        title = f"{model}: {sum(sizes(shapes)):,} parameters in {len(shapes)} tensors, host and device together"
        table = report.table(title, {"step": "<28"} | TIMES | {"x AdamW(fused)": ">14.3f"})
        clock = until_idle(device, STEPS_AT_A_TIME)
        timed = time_by_turns(peers, device, report.rounds or 20, warmup=2, clock=clock)
        for name, timing in timed.items():
            ratio = timing.median / timed[FUSED].median
            table.add(step=name, **times(timing), **{"x AdamW(fused)": ratio})
        for call in steps.values():
            check(call)
    if device.type != "cuda":
        report.note("graphs are captured on CUDA only")
