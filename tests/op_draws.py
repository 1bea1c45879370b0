"""Draws arguments of ops: layouts, masks, ranks, dtypes, what is left out, numbers that are none or at an edge.

Draw ``i`` of an op is the same everywhere. Of each choice, draws take the options in turn, in an order of their own: in
as many draws as there are options each is there, and after some more so are most pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import outer_rules as of_matrices
import quantise_rules as of_levels
import torch
from op_arguments import BFLOAT16, CODES, Problem, arguments_of
from op_rules import FOLLOWS, SERVERS, either
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedonebit import triton_kernels as ops
from fusedonebit.triton_kernels import FlatLayout
from fusedonebit.triton_kernels.finish import LANES, PIECE, Segments
from fusedonebit.triton_kernels.headers import Flag
from fusedonebit.triton_kernels.marsit_signs import threshold_of
from fusedonebit.triton_kernels.op import OPS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OURS = [name for name in OPS if hasattr(ops, name)]
"""Without those that tests declare."""
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WAYS = (
    (True, False, False, True, False),
    (True, True, False, True, False),
    (True, False, True, False, False),
    (True, True, True, False, False),
    (False, True, False, True, False),
    (False, True, False, False, False),
    (True, False, False, False, False),
    (True, False, False, True, True),
    (True, True, False, True, True),
)
"""Of calling ``local_step``: moves, last, decay_in_update, precondition, follows."""
LONG = (45 * 128, 5, (2 * PIECE + 70) * 128, *[3] * (LANES + 2))  # of every kind of segment more than one
SOME = ((0, 0), (0, 1), (0, 7), (1, -1), (1, 0), (1, 1), (2, 0), (3, 66))
"""Sizes of tensors: blocks, and elements more."""

# ---------------------------------------------------------------- choices

CHOICES: dict[str, tuple[Any, ...]] = {
    "hold": (0, 0, int(Flag.OVERFLOW), 0),
    "skip": (0, 0, 1, 0, 0, 6),
    "advance.flags": (None, 0, 0, 8, 3),
    "renew_levels.flags": (0, int(Flag.VETO), 0, 1),
    "follow_level.flags": (0, 0, 1),
    "header_pending": (0, 1, 0, 33),
    "header_flags": (0, 2),
    "header_counter": (None, 2**31 - 1, -3),
    "norm": (0, 1, 2, 3),
    "seed": (12_345, 0, 1, 2**31 - 1),
    "threshold": (*map(threshold_of, range(2, 10)), 1, 3 << 30, (1 << 31) - 1, (1 << 31) + 1, (1 << 32) - 1),
    "weighs": (0, 1, 2, 3),
    "most": (0.5, torch.inf, 0.0),
    "started": (0, 1),
    "found_inf": (None, 0.0, 1.0, 3.0),
    "loss_scale": (None, ..., 1024.0, torch.inf, torch.nan),
    "scale_coefficients.told": (
        *((0.0, 0.0), (0.0, 7.0), (1.0, 7.0), (3.0, 1e30), (0.0, torch.inf), (0.0, torch.nan), (1.0, 3.0, 2.0)),
        (0.0, 3.0, 1.0),
    ),
    "limit_largest": (1e9, 1e-9, 1.0, torch.nan),
    "tell_squares.first_block": (0, 7, 2**29),
    "rounding": (None, ...),
    "correction": (None, torch.int8, torch.int16),
    "momentum_compress.worker_sq": (None, ...),
    "exp_avg_sq_factors": (None, None, ...),
    "compensated_limit": (torch.inf, 0.5, 0.0),
    "step_share": (1.0, 0.25),
    "follow_level.world_size": (3, 1),
    "floor": (0.25, 0.3),
    "updates": (3, 2**33 + 9),
    "step": (7, 2**32 + 7),
    "x": (*DTYPES, torch.float64, *INTEGERS),
    "renew_levels.sums": (..., torch.float64),
    **of_levels.CHOICES,
    **of_matrices.CHOICES,
}
"""What to take in turn of arguments, where a declaration does not say it."""
HEARD = (0, 1, 0, (0,), 0, 34, 0, (1,), 0, -64, 0, (2,), 0, 2, 0, (3,), 0, (4,))
LAYOUT: dict[str, tuple[Any, ...]] = {
    "sizes": (None,),
    "world_size": (1, 2, 3, 4, 5),
    "parts": (1, 2, 3),
    "block_size": (128, 128, 256, 128, 512, 1024),
    "masked": (False, True),
    "excluded": (False, False, True),
    "dtype": (*DTYPES, None, torch.float32, None),
    "scope": ("layer", "block", "global"),
    "ternary": (False, True),
    "edges": ("", "all"),
    "zeros": (False, False, False, True, False),
    "unaligned": (False, False, True),
    "empty": (False, False, True),
    "tiles": (False, False, True),
    "gaps": (False, True),
}
"""The same of what is no argument: of the problem, and of what else is done with it."""
UNSAID: dict[str, dict[str, tuple[Any, ...]]] = {
    "momentum_compress": {"in_place": (False, False, True)},
    "server_reduce": {"keeps": (True, True, False), "world_size": (1, 2, 3, 7, 8, 9, 17, 33), "heard": HEARD},
    "receive": {"heard": HEARD, "sizes": (None, (2 * 130 * 128,), None)},
    "close_round": {"heard": HEARD, "world_size": (1, 2, 17, 3, 130), "rows": (None, 17)},
    "close_parts": {"heard": (0, 0, 1, 32), "sizes": (None, (2 * 2100 * 128,), None)},
    "local_step": {"way": WAYS},
    "local_update": {
        "kind": ("plain", "sgd", "adam"),
        "chunks": (None, (0, 1), (1, 3), (2, 3)),
        "shared": (False, False, True),
    },
    "renew": {"server": (False, True)},
    "rebuild_momentum": {"coefficients": (None, ...)},
    "finish": {"sizes": (None, LONG, None), "measured": (True,) * 4 + (False,), "world_size": (1, 3, 2, 40, 300)},
    "finish_alone": {"sizes": (None, LONG), "world_size": (1,), "coefficients": (None, ...)},
    "advance": {"sizes": tuple((3,) * n for n in (1, 3, 64, 130))},
    "scale_coefficients": {"sizes": tuple((3,) * n for n in (1, 3, 200))},
    "merge_signs": {"sizes": ((128,), (384,), (16_512,), (70_400,))},
    **either("pick_owned place_owned", {"sizes": ((128,), (384,), (16_512,))}),
    **of_levels.UNSAID,
    **of_matrices.UNSAID,
}
"""The same for an op."""
SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, -1e-45, 3e38, 9e18, -1.95e19)
UNCOUNTED = (1.95e19, 2.5e19, -3e19)  # too large a gradient, whose square is finite
TIES = (1 + 2**-8, -1 - 3 * 2**-8, 1 + 2**-11)  # between two bfloat16, or two float16
SCALE = (0.0, torch.inf, 1e-45, 3e38)
EDGES: dict[str, tuple[float, ...]] = {
    **either("grads", SPECIAL + UNCOUNTED),
    **either("params tensors x compensated compensated_numbers exp_avg moments_exp_avg momentum", SPECIAL),
    "values": TIES + SPECIAL,
    **either("exp_avg_sq exp_avg_sq_numbers moments_exp_avg_sq fresh", (0.0, 1e-45, 1e-42, 3e38, torch.inf)),
    **either("exp_avg_scale last_scale compensated_scale worker_scale arrived_scales", SCALE),
    **either("worker_measured server_measured close_parts.scale outer_scales", SCALE),
    **either("lamb_follow.scale largest", SCALE[:2]),
    **either("finish.partials finish_alone.partials x_squares update_squares", (0.0,)),
    "norms": (0.0, torch.inf, torch.nan),
    "lamb_rescale.norms": (0.0, torch.nan),
}
"""What is put among numbers, in draws with edges."""

# ---------------------------------------------------------------- a draw


@dataclass
class Draw:
    """Arguments of an op as they are drawn; ``make`` makes the same anew, each tensor in memory of its own.

    Attributes:
        layout: Of the problem.
        asked: Of the op's arguments.
        how: What else is done with them.
    """

    op: str
    number: int
    layout: dict[str, Any]
    asked: dict[str, Any]
    how: dict[str, Any]

    def make(self, device: torch.device | str = "cpu") -> Any:
        p = self._problem()
        arguments = p.arguments(self.op, **self.asked)
        if self.how.get("in_place"):
            arguments = arguments._replace(bits=arguments.exp_avg.bits)
        if self.how.get("shared"):
            arguments = arguments._replace(header_words=arguments.header.words[:1].expand(p.layout.world_size, -1))
        if rows := self.how.get("rows"):
            (words, own, summed, heads), kind = arguments.received, type(arguments.received)
            fewer = kind(words, own, summed[:rows], None if heads is None else heads[:rows])
            arguments = arguments._replace(received=fewer)
        if not self.how.get("measured", True):
            none = Segments.of(torch.zeros(0, dtype=torch.int64), torch.ones(p.layout.n_blocks))
            arguments = arguments._replace(segments=none)
        if self.how["edges"]:
            put_edges(arguments, self.number, self.how["edges"])
        return self._moved(arguments, device)

    def _problem(self) -> Problem:
        layout = dict(self.layout)
        masks = {i: torch.arange(n) % 3 > 0 for i in layout.pop("masked") if (n := layout["sizes"][i])}
        p = Problem(**layout, seed=self.number, masks=masks)
        if self.how["empty"]:
            p.grads[0] = torch.empty(0)
        if self.how["zeros"]:  # of either sign, as after a skipped step
            for x in (p.compensated, p.worker_scale, p.exp_avg_scale, *p.grads, *p.params):
                x *= 0.0
        # What does not count must enter nothing.
        p.exp_avg_sq[~p.live_mask] = 3.0
        p.compensated[~p.live_mask] = 3.0 if "moments_exp_avg" in OPS[self.op].arguments else torch.nan
        return p

    def _moved(self, arguments: Any, device: torch.device | str) -> Any:
        strided = {p.name.removesuffix("_stride") for p in OPS[self.op].parameters if p.name.endswith("_stride")}
        flat: list[Any] = []
        seen: dict[int, Tensor] = {}
        gaps = 0
        for name, x in zip(OPS[self.op].arguments, arguments.flat, strict=True):
            if isinstance(x, list):
                flat.append([moved(each, device, 0, k % 2 * self.how["unaligned"]) for k, each in enumerate(x)])
            elif isinstance(x, Tensor):
                gaps += name in strided
                gap = 16 // x.element_size() * (1 + gaps % 3) if self.how["gaps"] and name in strided else 0
                flat.append(seen.setdefault(id(x), moved(x, device, gap)))
            else:
                flat.append(x)
        signature = OPS[self.op].signature
        places = {name: i for i, name in enumerate(signature.slots)}
        values = [flat[places[name]] if noun is None else noun.of(flat) for noun, name in signature._each]
        return arguments_of(self.op, values)


GUARD = 64
"""Numbers before and behind a tensor that are none of its."""


def moved(x: Tensor, device: torch.device | str, gap: int = 0, shift: int = 0) -> Tensor:
    """Return a tensor in memory of its own, amid numbers that nobody must read or write; ``gap``: between its rows."""
    if x.dim() > 1 and x.stride(0) == 0:
        return moved(x[0], device).expand(x.shape)
    rows = x.shape[0] if gap and x.dim() > 1 else 1
    width, strides = x.numel() // max(rows, 1) + gap, torch.empty(x.shape, device="meta").stride()
    room = torch.empty(2 * GUARD + shift + rows * width, dtype=x.dtype, device=device)
    room.view(torch.bool if x.dtype is torch.bool else torch.uint8).fill_(0xFF)  # NaN, or -1
    return room.as_strided(x.shape, (width, *strides[1:]) if rows > 1 else strides, GUARD + shift).copy_(x)


def put_edges(arguments: Any, seed: int, where: str) -> None:
    """Put some of the largest, the least, and what is no number among an op's numbers, where they may be."""
    for name, x in zip(OPS[arguments.op].arguments, arguments.flat, strict=True):
        of = f"{arguments.op}.{name}"
        values: Sequence[float] = EDGES.get(of, EDGES.get(name, ())) if where in (name, "all") else ()
        dice = random.Random(f"{of} {seed}")
        values = dice.sample(values, min(len(values), dice.choice((1, 1, 2, 4, 9))))
        for each in x if isinstance(x, list) else [x]:
            if not values or not isinstance(each, Tensor) or not each.is_floating_point() or not each.numel():
                continue
            line = (each[1] if of == "lamb_rescale.norms" else each).view(-1)  # of m/denom no norm is infinite
            for i, value in enumerate(values):
                line[-1 if i == 0 else (i * 37 + seed) % len(line)] = value
            if each.dtype is torch.float32:  # the NaN that GPUs make: a carry makes -0.0 of it
                each[each.isnan()] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    if getattr(arguments, "correction", None) is not None:  # nothing is lacking of what is no number, or zero
        sizes, block_size = arguments.places[:2]
        for x, first in zip(arguments.params, FlatLayout(sizes, 1, block_size).first_block, strict=False):
            arguments.correction[first * block_size :][: len(x)][~x.isfinite() | (x == 0)] = 0


# ---------------------------------------------------------------- what leaves no room for what

Chosen = dict[str, Any]


def drop(chosen: Chosen, *names: str) -> None:
    for name in names:
        chosen.pop(name, None)


def of_masters(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    """Corrections of 8 bits are rounded stochastically, those of 16 are exact."""
    if chosen["correction"] is not None:
        drop(chosen, "rounding")


def of_moments(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    chosen["moments_exp_avg_sq"] = chosen["moments_exp_avg"]
    if "correction" in chosen:
        of_masters(chosen, how, layout)


def of_a_server(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    if not how.get("keeps", True):
        chosen["compensated_numbers"] = torch.empty(0)
    if chosen["words"] is None:
        chosen["header"] = None
    else:
        chosen["header_counts"] = False


def of_local_step(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    names = ("step_moves", "step_last", "step_decay_in_update", "step_precondition", "step_follows")
    chosen |= dict(zip(names, how["way"], strict=True))
    if not chosen["step_moves"]:
        drop(chosen, "anchor")


def of_local_update(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    chosen |= {"exp_avg": ..., "exp_avg_sq": ...}
    drop(chosen, *{"plain": ("exp_avg", "exp_avg_sq"), "sgd": ("exp_avg_sq",), "adam": ()}[how["kind"]])
    if not chosen["step_moves"]:
        drop(chosen, "step_anchor")
    if how["chunks"] and how["chunks"][1] <= layout["world_size"]:
        chosen["chunks_first"], chosen["chunks_last"] = how["chunks"]


def of_mean_squares(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    """What a variance is made of is in codes."""
    if chosen["exp_avg_sq_factors"] is not None:
        chosen["exp_avg_sq_numbers"] = CODES


def of_a_renewal(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    of_mean_squares(chosen, how, layout)
    if chosen["server"] or chosen["compensated"] is None:
        chosen["exp_avg"] = None


def of_squares(chosen: Chosen, how: Chosen, layout: Chosen) -> None:
    if chosen["told"] is None:
        chosen["earlier"] = None


ROOM: dict[str, Callable[[Chosen, Chosen, Chosen], None]] = {
    **either("apply_momentum move_along", of_masters),
    "momentum_compress": of_mean_squares,
    **either("adam_update lamb_update lamb_move", of_moments),
    **either("server_reduce outer_mean", of_a_server),
    "local_step": of_local_step,
    "local_update": of_local_update,
    "renew": of_a_renewal,
    "gradient_squares": of_squares,
}

# ---------------------------------------------------------------- draws


@cache
def options(op: str) -> dict[str, tuple[Any, ...]]:
    """Return what there is to choose of an op's arguments."""
    found: dict[str, tuple[Any, ...]] = {}
    signature = OPS[op].signature

    def add(flat: str, optional: bool) -> None:
        slot, follows = OPS[op].arguments[flat], flat in FOLLOWS or f"{op}.{flat}" in FOLLOWS
        chosen = CHOICES.get(f"{op}.{flat}", CHOICES.get(flat))
        if chosen is None and follows:
            return
        if chosen is None and slot.schema == "bool":
            chosen = (False, True)
        if chosen is None and slot.spec is not None and {CODES, BFLOAT16} <= set(slot.spec.dtypes):
            chosen = (..., BFLOAT16, CODES)
        if optional and not follows and (chosen is None or None not in chosen):
            chosen = (None, *(chosen or (...,)))
        if chosen is not None:
            found[flat] = chosen

    for name in signature.whole.parameters:
        if (noun := signature._nouns.get(name)) is None:
            add(name, OPS[op].arguments[name].schema == "Tensor?")
            continue
        if noun.optional and name not in FOLLOWS and f"{op}.{name}" not in FOLLOWS:
            found[name] = (None, ...)
        hints = get_type_hints(noun.kind)
        for each, flat in zip(noun.kind._fields, list(OPS[op].arguments)[noun.first :], strict=False):
            add(flat, type(None) in get_args(hints[each]))
    return found


def draws(
    op: str, first: int, last: int, fixed: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> Iterator[Draw]:
    """Draw arguments of an op; of what is ``fixed`` there is no other choice."""
    chosen = options(op) | LAYOUT | UNSAID.get(op, {})
    chosen |= {name: of for name, of in fixed.items() if name in chosen}
    for number in range(first, last):
        yield drawn(op, number, {name: turn(op, name, of, number) for name, of in chosen.items()})


def turn(op: str, name: str, of: tuple[Any, ...], number: int) -> Any:
    """Return the option whose turn it is: each of ``of`` comes once in as many draws, in another order each time."""
    lap, at = divmod(number, len(of))
    order = list(of)
    random.Random(f"{op} {name} {lap}").shuffle(order)
    return order[at]


def drawn(op: str, number: int, chosen: Chosen) -> Draw:
    """Make a draw of what was chosen."""
    dice, kernel = random.Random(f"{op} {number}"), OPS[op]
    how = {name: chosen.pop(name) for name in (*LAYOUT, *UNSAID.get(op, ())) if name in chosen}
    chosen |= {name: how.pop(name) for name in ("server", "heard", "coefficients") if name in how}
    most = 5 if "block_size" in kernel.arguments else 12  # tensors, where no element is looked at
    each = how["world_size"] if op in SERVERS else 1  # so that a server's chunk is several blocks
    some = [dice.choice(SOME) for _ in range(dice.randint(1, most))]
    sizes = how["sizes"] or tuple(each * (blocks * how["block_size"] + more) for blocks, more in some)
    parts = how["parts"] if op in ("receive", "close_parts", "apply_momentum") else 1
    masked = [i for i in range(len(sizes)) if how["masked"] and dice.random() < 0.5]
    layout = {
        "sizes": sizes,
        "world_size": how["world_size"] * parts,
        "block_size": how["block_size"] if max(sizes) < 5000 else 128,
        "parts": parts,
        "scope": how["scope"],
        "rank": dice.randrange(how["world_size"]),
        "ternary": how["ternary"] and "TERNARY" in [p.name for p in kernel.parameters],
        "dtype": how["dtype"] or [dice.choice(DTYPES) for _ in sizes],
        "masked": masked,
        "excluded": [i for i in range(len(sizes)) if how["excluded"] and i not in masked and dice.random() < 0.5],
    }
    if op in ROOM:
        ROOM[op](chosen, how, layout)
    for name, noun in kernel.signature._nouns.items():
        if name in chosen and chosen[name] is None:
            drop(chosen, *list(kernel.arguments)[noun.first :][: len(noun.slots)])
            if not noun.optional:  # it is there, but for what may be left out
                del chosen[name]
    return Draw(op, number, layout, chosen, how)


def faked(mode: FakeTensorMode, value: Any) -> Any:
    """Return an argument as a mode of fake tensors has it."""
    if isinstance(value, list):
        return [mode.from_tensor(x) for x in value]
    return mode.from_tensor(value) if isinstance(value, Tensor) else value
