"""What may be in arguments of ops whose dtype and shape don't say it: by name, or by op and name (``op_arguments``).

A rule makes an argument of a ``Making``: of the problem, and of what is made already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import outer_rules as of_matrices
import quantise_rules as of_levels
import torch
from torch import Tensor

from fusedonebit.optim.own_variance import places as level_places
from fusedonebit.triton_kernels import LARGEST_GRADIENT, SCALE_NORMS, TAIL, Coef, Group, Layer
from fusedonebit.triton_kernels.close_round import SPAN as ROUND_SPAN
from fusedonebit.triton_kernels.compress import OWN
from fusedonebit.triton_kernels.finish import PIECE, Segments
from fusedonebit.triton_kernels.headers import CHECKED, PARTLY, Flag, Word
from fusedonebit.triton_kernels.nouns import Arrived, Codes, Side
from fusedonebit.triton_kernels.parts import programs_of
from fusedonebit.triton_kernels.projections import Projections
from fusedonebit.triton_kernels.receive import spans_of
from fusedonebit.triton_kernels.renewal import SUMS
from fusedonebit.triton_kernels.rules import GROUP_COLUMNS

Rule = Callable[[Any], Any]
SERVERS = ("server_reduce", "average_squares", *of_levels.ON_CHUNKS, *of_matrices.ON_CHUNKS)
"""Ops that work on one rank's chunk."""
BETAS = ((0.9, 0.999), (0.0, 0.95), (0.95, 0.99999))
"""Of groups."""
LATER = 2**33 + 5
"""Updates done, with which random bits are drawn."""


def either(names: str, rule: Any) -> dict[str, Any]:
    """Give several names one rule."""
    return dict.fromkeys(names.split(), rule)


# ---------------------------------------------------------------- what is there because something else is


def narrow(name: str, *without: torch.dtype) -> Rule:
    """Tell whether what is kept is in codes or, unless it is ``without`` that, in bfloat16."""
    return lambda m: isinstance(x := m.keeps(name), Tensor) and x.dtype not in (torch.float32, *without)


def coded(name: str) -> Rule:
    return narrow(name, torch.bfloat16)


def given(name: str) -> Rule:
    return lambda m: m.keeps(name) is not None


FOLLOWS: dict[str, Rule] = {
    "compensated_exponents": coded("compensated_numbers"),
    "compensated_drawn": narrow("compensated_numbers"),
    "outer_compress.drawn": narrow("compensated"),
    "moments_exponents": coded("moments_exp_avg"),
    "moments_drawn": lambda m: m.op.name != "lamb_move" and narrow("moments_exp_avg")(m),
    "exp_avg_sq_exponents": coded("exp_avg_sq_numbers"),
    "worker_sq_exponents": coded("worker_sq_numbers"),
    "residual_exponents": coded("residual_numbers"),
    "rounding": lambda m: m.asked.get("correction") is torch.int8,
    "squares": given("limit"),
    "limit_coef": lambda m: m.op.name != "finish_alone",
    **either("renew.scale renew.settled", given("compensated_numbers")),
    **either("server_reduce.header outer_mean.header", given("words")),
    "local_update.exp_avg": given("exp_avg_sq"),
    "finish_alone.coefficients": given("limit"),
    "apply_momentum.steps": given("count"),
    **either(
        "coefficients_groups coefficients_group_of coefficients_steps",
        lambda m: m.op.name == "advance" or "coefficients" in m.done,
    ),
    **either(
        "limit_block_tensor limit_weight limit_largest limit_norm coefficients_table count_updates", lambda m: True
    ),
}
"""When an argument that may be left out is there because others are."""


# ---------------------------------------------------------------- rules of more than a line


def positive(m: Any) -> Tensor:
    return m.p.normal(*m.shape).abs().to(m.dtype)


def sparse(m: Any) -> Tensor:
    """Return numbers that are not negative, a third of them zeros."""
    return (positive(m) * (m.p.uniform(*m.shape) < 0.7)).to(m.dtype)


def whole(name: str) -> Rule:
    """Return what the problem has by this name; of servers their chunk's."""
    return lambda m: getattr(m.p, name)[m.elements]


def by_block(name: str) -> Rule:
    return lambda m: getattr(m.p, name)[..., m.blocks]


def nothing(m: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def segments(m: Any) -> Segments:
    segment = m.p.layout.scale_segments(m.p.scope).int()
    live = torch.bincount(segment, m.p.table.numel.double())
    return Segments.of(segment, nothing(m, len(live)))._replace(live=live)


def slots(m: Any) -> int:
    return m.p.layout.scale_slots(m.p.scope)[1]


def arrived(m: Any) -> Arrived:
    """Layout words differ from part to part."""
    words, own_words = m.p.headers(m.known["M"], m.p.parts, m.heard)
    summed = m.p.integers(0, 256, (m.known["M"], m.p.layout.chunk_bytes + 24), torch.uint8)
    return Arrived(words, own_words, summed, m.p.normal(m.known["M"], slots(m)).abs())


def side(m: Any, segment: Tensor) -> Side:
    """Scales as they were measured, of blocks in these segments."""
    measured = m.p.normal(int(segment[-1]) + 1).abs()
    return Side(segment.int(), measured, nothing(m, len(segment)), nothing(m, len(segment)))


def served(m: Any) -> Side:
    slot = m.p.layout.scale_slots(m.p.scope)[0].view(m.p.parts, -1, m.p.layout.blocks_per_chunk)[:, m.p.rank]
    return side(m, (slot + slots(m) * torch.arange(m.p.parts)[:, None]).view(-1))


def sums_of_blocks(m: Any) -> Tensor:
    """Return sums of |c| and of c^2, and how many are not zero, where ternary; their order shows."""
    counted = m.p.table.numel.double()
    if m.p.ternary:
        counted = (m.p.uniform(len(counted)) * (counted + 1)).floor()
    absolute = counted * m.p.uniform(len(counted))
    squares = absolute.square() / counted.clamp(min=1) * (1 + 9 * m.p.uniform(len(counted)))
    return torch.stack([absolute, squares, counted])[: len(m.p.partials)]


def groups(m: Any) -> Tensor:
    rows = m.p.uniform(len(BETAS), GROUP_COLUMNS)
    rows[:, Group.CORRECTION1 : Group.CORRECTION2 + 1] = torch.tensor(BETAS, dtype=torch.float64)
    rows[0, Group.FLOOR] = 0.0
    rows[:, Coef.LR] = torch.tensor([1e-3, 0.3, 1e-7])
    return rows


def entered(m: Any) -> Tensor:
    """Updates that have, or infinitely many; no more than were made."""
    few = m.done["coefficients_steps"].minimum((m.p.uniform(*m.shape) * 3000).floor())
    return few.where(m.p.uniform(*m.shape) < 0.7, math.inf)


def codes(m: Any, rows: int = 0) -> Codes:
    """Return codes of any numbers, in rows of a chunk each or of a worker's; the first are large."""
    rows = rows or m.known["W" if m.op.name == "average_squares" else "R"]
    blocks = m.known["B"] // (1 if m.server else rows)
    numbers = m.p.integers(0, 256, (rows, blocks * m.known["block_size"]), torch.uint8)
    exponents = m.p.integers(1, 240, (rows, blocks), torch.uint8)
    exponents[:, :1] = 255 if m.op.name == "average_squares" else 130
    return Codes(numbers, exponents)


def projections(m: Any) -> Tensor:
    """Room for those that workers tell; or what they have told, one of them no number."""
    if m.op.name == "tell_level":
        return nothing(m, int((m.p.layout.block_size // level_places(m.p.layout)[0]).sum()))
    width = Projections.of(m.p.layout).width
    if not m.server:
        return nothing(m, m.known["R"], width)
    told = m.p.normal(m.known["W"], width)
    told[-1, 0] = torch.inf
    return told


def place_of_projections(m: Any) -> Tensor:
    if m.op.name != "tell_level":
        return getattr(Projections.of(m.p.layout), m.flat)[m.blocks]
    share = level_places(m.p.layout)[0]
    counts = m.p.layout.block_size // share
    return (share if m.flat == "share" else counts.cumsum(0) - counts).int()


def told_levels(m: Any) -> Tensor:
    """Projections, one infinite, and sums; the last tensor but one has none."""
    count = level_places(m.p.layout)[2][-1]
    told = m.p.normal(count + m.known["T"])
    told[count:] = told[count:].abs() * 100
    told[count:][-2:-1] = 0.0
    told[:count][-1:] = torch.inf
    return told


def levels(m: Any) -> Tensor:
    """Return levels that were followed last two updates ago; of a renewal the first is idle, the second waits."""
    made, steps, renews = m.p.normal(*m.shape).abs(), m.done["steps"].float(), m.op.name == "renew_levels"
    made[3 if renews else 2] = (steps - 2.0).clamp(min=0.0)
    if renews:
        made[3, :1], made[0, 1:2], made[1, 1:2] = steps[:1], 0.0, 0.0
        made[4, :1] = 100.0 * made[0, :1]
        made[2, : m.known["T"] // 2] = 0.0
    return made


def sums_of_squares(m: Any) -> Tensor:
    """Sums of chunks' blocks, or of whole tensors: the first has no gradient, the last no squares; one is infinite."""
    first, chunks = first_blocks(m), m.known["W"] if by_blocks(m) else 1
    each = m.p.normal(SUMS, m.p.layout.n_blocks if by_blocks(m) else m.known["T"]).abs()
    for row, begin, end, value in ((2, first[-2] - 1, first[-2], torch.inf), (0, first[-2], first[-1], 0.0)):
        each[row, max(0, begin) : end] = value
    each[2, : first[1]] = 0.0
    each[4, : first[1]] = 0.0
    return each.view(SUMS, chunks, -1).transpose(0, 1).contiguous()


def by_blocks(m: Any) -> bool:
    return (m.done["sums"].dtype if "sums" in m.done else m.wanted) is not torch.float64


def first_blocks(m: Any) -> list[int]:
    return list(m.p.layout.first_block if by_blocks(m) else range(m.known["T"] + 1))


def largest(m: Any) -> Any:
    """Return ratios, some infinite, unless they are blended; or of gradients the largest that counts."""
    if m.op.name != "lamb_rescale":
        return LARGEST_GRADIENT
    infinite = m.p.uniform(*m.shape) < (0.0 if m.asked.get("norms") is not None else 0.1)
    return torch.where(infinite, torch.inf, 2 * sparse(m)).float()


def correction(m: Any) -> Tensor:
    """What bfloat16 parameters lack; of others 0."""
    dtype = m.wanted or torch.int16
    lacks = m.p.integers(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1, m.shape, dtype)
    for i, x in enumerate(m.p.params):
        if x.dtype is not torch.bfloat16:
            lacks[m.p.layout.offset(i) : m.p.layout.offset(i) + x.numel()] = 0
    return lacks


def followed_squares(m: Any) -> Tensor:
    """The worker's own, kept as c is: the exponents of codes among those of c."""
    x = torch.where(m.p.live_mask, m.p.normal(m.p.layout.numel).square(), 0.0)
    x = m.kept(x, m.done["compensated_numbers"].dtype)
    if m.flat in m.exponents:
        m.done["compensated_exponents"][OWN] = m.exponents[m.flat]
    return x


def told_squares(m: Any) -> Tensor:
    """What a worker keeps of its gradients' squares: over more exponents than logarithms have, and zeros."""
    x = m.p.normal(m.p.layout.numel).square() * torch.exp2(-36.0 * m.p.uniform(m.p.layout.numel).float())
    x[::17] = 0.0
    return torch.where(m.p.live_mask, x, 0.0)


def rows_of_exponents(m: Any) -> Tensor:
    """Return those of what is kept in codes: a row for each, and for what else the op keeps so."""
    names = ("compensated_numbers", "moments_exp_avg", "moments_exp_avg_sq")
    of = [m.exponents[name] for name in names if name in m.exponents]
    if m.op.name == "momentum_compress":
        of += [torch.zeros_like(of[0])] * OWN
    return of[0] if m.op.name == "renew" else torch.stack(of)


def exponents(m: Any) -> Tensor:
    return m.exponents[m.flat.replace("exponents", "numbers")]


def merged_words(m: Any) -> Tensor:
    """Half of those that arrive differ."""
    theirs = m.p.integers(-(2**31), 2**31 - 1, m.shape)
    return torch.where(m.p.uniform(*m.shape) < 0.5, m.done["words"], theirs)


def fresh(m: Any) -> Tensor:
    """The variance or, before the first step, a momentum."""
    return m.p.normal(m.p.layout.numel).square() * 1e-2 if m.asked.get("started", 1) else m.p.compensated


def next_variance(m: Any) -> Tensor:
    """Return what a variance is made with; the last tensor waits for its first gradient."""
    tables = positive(m) * torch.tensor([[1.0], [0.1], [0.01]])
    tables[:, -1:] = 0.0
    return tables


# ---------------------------------------------------------------- all

NOUNS: dict[str, Rule] = {
    "segments": segments,
    "receive.arrived": arrived,
    "worker": lambda m: side(m, m.p.layout.scale_segments(m.p.scope)),
    "server": served,
    **either("logs means average_squares.arrived", codes),
    "mean": lambda m: codes(m, 1),
    **of_levels.NOUNS,
    **of_matrices.NOUNS,
}
"""Arguments whose fields depend on each other."""
NUMBERS: dict[str, float] = {
    **either("receive.flags close_round.flags finish_alone.flags server_reduce.flags close_parts.flags", -1),
    **either("scale_coefficients.hold kept_words digest_sums", -1),
    **either("compensated_drawn moments_drawn outer_compress.drawn rounding", LATER),
    **either("updates step scale_coefficients.world_size follow_level.world_size close_round.steps", 3),
    **either("rebuild_momentum.exp_avg finish_alone.worker_scale", math.nan),
    **either("started found_inf limit_largest", 1),
    **either("loss_scale earlier max_norm weighs", 2),
    **either("factor most", 0.5),
    **either("flatten.factor unscale", 1 / 3),
    "adam_update.first": 7,
    "found_before": PARTLY,
    "header_number": 7,
    "header_counter": 2**31 - 1,
    "header_tag": 2**31 - 1,
    "header_digest": -12_345 << 17,
    "finish.digest": (7 << 32) + ((-12_345 ^ 7) & 0xFFFFFFFF),  # halves that together are -12345
    "apply_momentum.digest": 2**63 - 5,
    "digest_updates": 2**63 - 7,
    "count_updates": 5,
    "count_number": 2**31 - 1,
    "count_veto": int(Flag.VETO),
    "count_bad": int(Flag.NONFINITE | Flag.ABORT),
    "coefficients_length": 3,
    "compensated_limit": math.inf,
    "step_factor": 1.25,
    "woken": 4,
    "follow_level.rho": 0.7,
    "floor": 0.25,
    "threshold": (1 << 31) + 1,
    "seed": 12_345,
    "checked": CHECKED,
    "merge_signs.flags": int(Word.FLAGS),
    "mismatch": int(Flag.MISMATCH),
    "norm": SCALE_NORMS["contractive"],
    **of_levels.NUMBERS,
    **of_matrices.NUMBERS,
}
"""Numbers, and what tensors are filled with."""
RULES: dict[str, Rule] = {
    # where elements and blocks lie
    "sizes": lambda m: () if m.server else m.p.layout.sizes,
    "block_size": lambda m: m.p.layout.block_size,
    "rank": lambda m: m.p.rank,
    "chunks_last": lambda m: m.known["W"],
    "block_tensor": lambda m: m.p.places.block_tensor[m.blocks],
    "limit_block_tensor": lambda m: m.p.places.block_tensor,
    "live": lambda m: m.p.places.live,
    "live_row": lambda m: m.p.places.live_row[m.blocks],
    "numel": lambda m: m.p.table.numel,
    "layer_start": lambda m: torch.tensor([*m.p.layout.first_block[:-1], m.p.layout.n_blocks]),
    "segment": lambda m: m.p.layout.scale_segments(m.p.scope).int(),
    "arrived_slot": lambda m: m.p.layout.scale_slots(m.p.scope)[0][m.blocks].int(),
    "follow_level.first": lambda m: torch.tensor(level_places(m.p.layout)[2], dtype=torch.int32),
    "renew_levels.first_block": lambda m: torch.tensor(first_blocks(m), dtype=torch.int32),
    **either("share place", place_of_projections),
    # users' tensors, and what is kept of each element or block
    **either("tensors grads directions", lambda m: m.p.grads),
    "params": lambda m: m.p.params,
    **either("coef limit_coef coefficients_table", lambda m: m.p.coef),
    **either("compensated compensated_numbers moments_exp_avg", whole("compensated")),
    **either("exp_avg_sq exp_avg_sq_numbers moments_exp_avg_sq", whole("exp_avg_sq")),
    **either("worker_scale compensated_scale", by_block("worker_scale")),
    "exp_avg": lambda m: m.p.normal(m.p.layout.numel),
    "exp_avg_scale": lambda m: m.p.exp_avg_scale,
    "exp_avg_bits": lambda m: m.p.exp_avg_bits,
    "arrived_bits": lambda m: m.p.exp_avg_bits if m.server else m.p.bytes(m.known["W"]),
    "bits": lambda m: m.p.bits[:1] if m.server else m.p.bits,
    **either("pack.bits unpack.bits", lambda m: m.p.bits.view(-1)),
    "partials": by_block("partials"),
    **either("finish.partials finish_alone.partials", sums_of_blocks),
    "momentum_compress.found": lambda m: m.p.found,
    "momentum_compress.worker_sq": followed_squares,
    "worker_sq_numbers": told_squares,
    **either("compensated_exponents moments_exponents", rows_of_exponents),
    **either("exp_avg_sq_exponents worker_sq_exponents", exponents),
    "fresh": fresh,
    "values": lambda m: m.p.normal(m.p.layout.numel + 8),
    "correction": correction,
    "out": lambda m: nothing(m, m.p.layout.numel + TAIL),
    # what ranks count and tell
    "scale_coefficients.digest": lambda m: torch.tensor([2**63 - 5, 1]),
    "count_replays": lambda m: torch.arange(4),
    **either("absent count_absent", lambda m: (m.p.uniform(*m.shape) < 0.3).to(torch.uint8)),
    **either("header_words words", lambda m: m.p.headers(m.shape[0])[0]),
    "merge_signs.words": lambda m: m.p.integers(-(2**31), 2**31 - 1, m.shape),
    "merge_signs.arrived_words": merged_words,
    **either("received_words server_reduce.arrived_words", lambda m: m.p.headers(m.known["W"], heard=m.heard)[0]),
    "received_own_words": lambda m: m.done["received_words"][0].clone(),
    "server_reduce.arrived_own_words": lambda m: m.done["arrived_words"][0].clone(),
    "received_summed": lambda m: m.p.integers(
        0, 256, (m.known["W"], 8 * ROUND_SPAN + 40 if m.known["W"] < 4 else 512), torch.uint8
    ),
    "received_heads": lambda m: m.p.integers(0, 256, (m.known["W"], 96), torch.uint8),
    "arrived_scales": lambda m: m.p.normal(m.known["W"], slots(m)).abs(),
    "message_scales": lambda m: nothing(m, m.known["W"], slots(m)),
    "weights": lambda m: nothing(m, m.known["W"], m.p.layout.scale_slots("block")[1]),
    "receive.squares": lambda m: nothing(m, m.known["M"] * spans_of(m.p.layout.blocks_per_chunk), dtype=torch.float64),
    "close_parts.found": lambda m: torch.tensor([0] * (m.p.parts - 1) + [m.heard], dtype=torch.int32),
    "close_parts.kept": lambda m: m.p.normal(m.p.parts, 5).abs() + 0.1,
    "close_parts.squares": lambda m: nothing(m, programs_of(m.done["scale"]), dtype=torch.float64),
    # the table of coefficients
    "coefficients_groups": groups,
    "coefficients_lr": lambda m: m.p.uniform(len(BETAS)).float(),
    "coefficients_group_of": lambda m: m.p.integers(0, len(BETAS), m.shape),
    "coefficients_steps": lambda m: (m.p.uniform(*m.shape) * 2 ** (17 * m.p.uniform(*m.shape))).floor(),
    "coefficients_mean_sq": lambda m: m.p.uniform(*m.shape) - 0.2,
    "coefficients_moved": lambda m: m.p.uniform(*m.shape).float(),
    "advance.entered": entered,
    **either("unit advance.rho", lambda m: 0.01 + m.p.uniform(*m.shape).float()),
    # layers, levels, squares
    "layers": lambda m: m.p.uniform(len(Layer), m.known["T"]).float() * 1.8 + 0.2,
    "norms": lambda m: nothing(m, *m.shape, dtype=torch.float64) if m.op.name == "lamb_update" else sparse(m).square(),
    "largest": largest,
    **either("last_scale limit_weight settled sent renew.scale close_parts.scale", positive),
    "lamb_follow.scale": sparse,
    **either("lamb_follow.x_squares update_squares", lambda m: 50 * sparse(m)),
    "renew_levels.sums": sums_of_squares,
    "renew_levels.mean_sq": lambda m: m.done["levels"][2].double(),
    "renew_levels.entered": lambda m: torch.zeros(m.shape, dtype=m.dtype),
    **either("renew_levels.factors renew.factors exp_avg_sq_factors", next_variance),
    "follow_level.told": told_levels,
    "levels": levels,
    "renew_levels.steps": lambda m: 5.0 + torch.arange(m.known["T"]).double(),
    **either("follow_level.steps apply_momentum.steps", lambda m: torch.arange(m.known["T"]).double()),
    "summed": lambda m: 3.0 + torch.arange(m.known["T"]),
    "awaited": lambda m: torch.arange(m.known["T"]).double() % 3,
    **either("arrived_projections projections", projections),
    "arrived_peaks": lambda m: m.p.normal(*m.shape).abs(),
    "gradient_squares.sums": lambda m: nothing(m, -(-m.known["B"] // PIECE), dtype=torch.float64),
    "gradient_squares.tickets": lambda m: torch.zeros(1 + -(-m.known["B"] // PIECE), dtype=torch.int32),
    "gradient_squares.told": lambda m: nothing(m, 2 if m.done["earlier"] is None else 3),
    "scale_coefficients.told": lambda m: torch.tensor([0.0, 7.0]),
    "ternary": lambda m: m.p.ternary,
    **of_levels.RULES,
    **of_matrices.RULES,
}
