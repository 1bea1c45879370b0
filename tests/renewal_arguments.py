"""Arguments of the ops that share squares of gradients and renew a variance."""

from __future__ import annotations

from typing import Any

import torch
from op_arguments import arguments_of
from torch import Tensor

from fusedonebit.comm.shared_squares import Rows
from fusedonebit.triton_kernels import tell_squares
from fusedonebit.triton_kernels.nouns import Codes, Divisor, Stored
from fusedonebit.triton_kernels.projections import Projections
from fusedonebit.triton_kernels.renewal import FACTORS, LEVELS, SUMS


def squares(p: Any, exponents: float = 36.0) -> Tensor:
    """What a worker keeps of its gradients' squares: over more exponents than logarithms have, and zeros."""
    x = p.normal(p.layout.numel).square() * torch.exp2(-exponents * torch.rand(p.layout.numel, generator=p._random))
    x[::17] = 0.0
    return torch.where(p.live_mask, x, 0.0)


def rows(p: Any, count: int, numbers: int) -> Rows:
    made = Rows(p.layout, count, numbers, torch.device("cpu"))
    made.buffer.zero_()
    return made


def tell_arguments(p: Any, factor: float | None = None, first_block: int = 0, updates: int = 3) -> Any:
    places, scale = Projections.of(p.layout), None if factor is None else torch.tensor([factor])
    sent = rows(p, p.layout.world_size, places.width)
    gradients = (p.grads, p.places, Stored(squares(p)), scale, torch.tensor(updates))
    where = (first_block, places.share, places.place)
    return arguments_of("tell_squares", *gradients, *where, sent.codes, sent.numbers.clone())


def average_arguments(p: Any, workers: int = 3, rank: int = 0) -> Any:
    """Of what ``workers`` have told of the chunk of one rank; one of them may have told no number."""
    places, blocks = Projections.of(p.layout), p.layout.blocks_per_chunk
    arrived, own = rows(p, workers, places.width), slice(rank * blocks, (rank + 1) * blocks)
    arrived.logs.copy_(torch.randint(256, arrived.logs.shape, generator=p._random))
    arrived.tops.copy_(torch.randint(1, 256, arrived.tops.shape, generator=p._random).clamp(max=240))
    arrived.tops[:, :1] = 255  # the largest that there are
    arrived.numbers.copy_(p.normal(*arrived.numbers.shape))
    arrived.numbers[-1, :1] = torch.inf
    served = rows(p, 1, SUMS * blocks)
    where = (places.share[own], places.place[own])
    told = (arrived.codes, arrived.numbers)
    return arguments_of("average_squares", p.places.at(own), *told, *where, served.codes, served.sums[0])


def level_arguments(p: Any, flags: int = 0, absent: bool = False, wide: bool = False) -> Any:
    """Levels of tensors: the first is idle, the second waits, the last has no squares any more, and an infinite sum."""
    tensors, chunks = len(p.layout.sizes), p.layout.world_size
    sums = p.normal(chunks, SUMS, p.layout.blocks_per_chunk).abs()
    first = torch.tensor(p.layout.first_block, dtype=torch.int32)
    if wide:  # of whole tensors
        sums, first = p.normal(1, SUMS, tensors).abs().double(), torch.arange(tensors + 1, dtype=torch.int32)
    by_block = sums.transpose(0, 1).reshape(SUMS, -1).clone()
    by_block[2, int(first[-2]) - 1] = torch.inf
    by_block[0, int(first[-2]) : int(first[-1])] = 0.0
    by_block[2, : int(first[1])] = 0.0  # no gradient in the first tensor
    sums.copy_(by_block.view(SUMS, len(sums), -1).transpose(0, 1))
    levels, steps = p.normal(LEVELS, tensors).abs(), 5.0 + torch.arange(tensors).double()
    levels[3] = steps.float() - 2.0
    levels[3, 0], levels[0, 1], levels[1, 1] = steps[0], 0.0, 0.0
    levels[4, 0] = 100.0 * levels[0, 0]  # what it was before
    mean_sq = levels[2].double()
    mean_sq[: tensors // 2] = 0.0
    missing = torch.arange(tensors).remainder(3).eq(0).to(torch.uint8) if absent else None
    told = (sums, first, p.coef, steps, torch.tensor([flags], dtype=torch.int32), missing, 0.25)
    written = (torch.zeros(tensors).double(), torch.tensor([4], dtype=torch.int32), torch.zeros(FACTORS, tensors))
    return arguments_of("renew_levels", *told, levels, mean_sq, *written)


def renew_arguments(
    p: Any,
    divided: bool = True,
    server: bool = False,
    writes: bool = True,
    inside: bool = False,
    half: bool = False,
) -> Any:
    """The worker's side, or a server's of the second chunk, or of what nothing was divided by."""
    tell = tell_arguments(p)
    tell_squares(*tell)
    means = tell.logs
    v = torch.where(p.live_mask, p.exp_avg_sq, 0.0)
    v[: p.layout.block_size] = 0.0  # of a tensor that waits
    v = v.bfloat16() if half else v
    tables = p.normal(FACTORS, len(p.layout.sizes)).abs() * torch.tensor([[1.0], [0.1], [0.01]])
    tables[1, -1] = 0.0  # of a tensor whose v stays
    side = (Stored(p.compensated), p.worker_scale, torch.zeros_like(p.worker_scale)) if divided else (None,) * 3
    exp_avg = p.exp_avg if divided and not server else None
    places = p.places
    if server:
        blocks = slice(p.layout.blocks_per_chunk, 2 * p.layout.blocks_per_chunk)
        elements = slice(blocks.start * p.layout.block_size, blocks.stop * p.layout.block_size)
        side = (Stored(p.compensated[elements]), *(each[blocks] for each in side[1:]))
        places, v, means = p.places.at(blocks), v[elements], Codes(*(each[1:2] for each in means))
    where = (Divisor(v, None, inside), means, tables)
    return arguments_of("renew", places, *side, exp_avg, p.ternary, p.coef, *where, writes)
