"""Valid arguments of any op, made of its declaration: each tensor by its dtype and shape, and by a rule where these do
not say what may be in it (``op_rules``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import op_rules as rules
import torch
from torch import Tensor

from fusedonebit.triton_kernels import Coef, FlatLayout, live_table
from fusedonebit.triton_kernels.codes import keep_nearest
from fusedonebit.triton_kernels.headers import CHECKED, Word
from fusedonebit.triton_kernels.nouns import Places, Signs
from fusedonebit.triton_kernels.op import OPS

with suppress(ModuleNotFoundError):  # a GPU machine may lack it: there nobody computes anything once more
    import numpy as np
Array = Any  # float64 NDArray
BFLOAT16, CODES = torch.bfloat16, torch.uint8
MIXED = (300, 0, 128, 1, 129)
MASKS = {0: torch.arange(300) % 3 > 0, 4: torch.arange(129) < 128}
LIVE = ({}, {"masks": MASKS, "excluded": [2]})
"""Sizes of tensors; which of their elements count."""


class Arguments(tuple[Any, ...]):
    """An op's arguments; each by its name as well: nouns, and fields of nouns."""

    op: str
    count = property(lambda self: self.__getattr__("count"))  # which tuples have a method of

    def __getattr__(self, name: str) -> Any:
        if name == "op" or name.startswith("__"):  # of one that is being copied
            raise AttributeError(name)
        parameters = OPS[self.op].signature.whole.parameters
        if name in parameters:
            return self[list(parameters).index(name)]
        argument, field = self._field(name)
        noun = getattr(self, argument)
        return None if noun is None else getattr(noun, field)

    def _field(self, name: str) -> tuple[str, str]:
        """Return the argument that a flat name begins with, and the rest."""
        parameters = OPS[self.op].signature.whole.parameters
        found = [each for each in parameters if name.startswith(f"{each}_")]
        if not found:
            raise AttributeError(f"{self.op} has no argument {name}: it has {', '.join(parameters)}")
        argument = max(found, key=len)
        return argument, name.removeprefix(f"{argument}_")

    def _asdict(self) -> dict[str, Any]:
        """Return all of them by name."""
        return dict(zip(OPS[self.op].signature.whole.parameters, self, strict=True))

    def _replace(self, **named: Any) -> Arguments:
        """Return them with others in place of some."""
        given = self._asdict()
        for name, value in named.items():
            if name in given:
                given[name] = value
            else:
                argument, field = self._field(name)
                given[argument] = given[argument]._replace(**{field: value})
        return arguments_of(self.op, given.values())

    @property
    def flat(self) -> Sequence[Any]:
        """Return them as ``torch.ops.fusedonebit`` takes them: nouns as their fields."""
        return OPS[self.op].signature.flat(*self)


def arguments_of(op: str, values: Any) -> Arguments:
    """Return values as the arguments of an op, those left out at the end as their defaults."""
    given = OPS[op].signature.whole.bind(*values)
    given.apply_defaults()
    arguments = Arguments(given.args)
    arguments.op = op
    return arguments


class Problem:
    """Tensors, masks and ranks, and what ops have on them: the same for all ops that are called on it, as in a step.

    Args:
        sizes, world_size, block_size: Of the layout.
        seed: Of all that is random.
        dtype: Of gradients and parameters; where there are several, they take turns.
        masks, excluded: As ``live_table`` takes them.
        ternary: Whether bits have two planes; then half of what is compressed are zeros of either sign.
        scope: Of scales.
        parts: Of a step in parts, of which each has as many of the layout's chunks.
        rank: Whose chunk a server works on.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        world_size: int = 1,
        block_size: int = 128,
        seed: int = 0,
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
        masks: Mapping[int, Tensor] | None = None,
        excluded: Sequence[int] = (),
        ternary: bool = False,
        scope: str = "layer",
        parts: int = 1,
        rank: int | None = None,
    ) -> None:
        self.ternary, self.scope, self.parts = ternary, scope, parts
        self.layout = FlatLayout(tuple(sizes), world_size, block_size)
        self.rank = world_size // parts - 1 if rank is None else rank
        self.random = torch.Generator().manual_seed(seed)
        self.table = live_table(self.layout, masks, excluded)
        self.live_mask = self.table.mask()
        self.coef = coefficients(len(sizes))
        self.places = Places.of(self.layout, self.layout.block_tensor().int(), self.table)
        dtypes = [dtype] if isinstance(dtype, torch.dtype) else dtype
        self.grads, self.params = (
            [self.normal(size).to(dtypes[(i + turn) % len(dtypes)]) for i, size in enumerate(sizes)]
            for turn in range(2)
        )
        blocks, numel = self.layout.n_blocks, self.layout.numel
        self.compensated = torch.where(self.live_mask, self.normal(numel), 0.0)
        self.worker_scale, self.exp_avg_scale = self.normal(2, blocks).abs()
        self.exp_avg_bits, self.bits = self.bytes(world_size), self.bytes(world_size)
        self.exp_avg_sq = self.normal(numel).square() * 1e-2
        self.exp_avg_sq[::17] = 0.0
        self.partials = torch.full((3 if ternary else 2, blocks), torch.nan, dtype=torch.float64)
        self.found = torch.tensor([32], dtype=torch.int32)
        if ternary:
            for x in (self.compensated, *self.grads):
                x[torch.rand(x.shape, generator=self.random) < 0.5] *= 0.0

    def arguments(self, op: str, **asked: Any) -> Any:
        """Return an op's arguments, without those that may be left out, unless they are asked for.

        ``asked``, by names of arguments, also of fields, ``exp_avg_sq_numbers``: a value; ``...``: any; a dtype, in
        which to keep a tensor: uint8 are codes; a number, for a tensor of that number; None: none.
        """
        return Making(self, op, asked).arguments()

    @property
    def exp_avg(self) -> Signs:
        return Signs(self.exp_avg_bits, self.exp_avg_scale)

    @property
    def live(self) -> Array:
        return self.live_mask.numpy()

    @property
    def own(self) -> tuple[slice, slice]:
        """Blocks and elements of the chunk that the server works on."""
        layout = self.layout
        return (
            slice(self.rank * layout.blocks_per_chunk, (self.rank + 1) * layout.blocks_per_chunk),
            slice(self.rank * layout.chunk_numel, (self.rank + 1) * layout.chunk_numel),
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random, dtype=torch.float64)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random, dtype=dtype)

    def bytes(self, rows: int) -> Tensor:
        return self.integers(0, 256, (rows, *[2] * self.ternary, self.layout.chunk_bytes), CODES)

    def headers(self, rows: int, own: int = 1, heard: int | tuple[int] = 0) -> tuple[Tensor, Tensor]:
        """Words of all ranks, as they lie in messages; and this rank's own of each part.

        ``heard``: flags in the last, some of them in the first instead; or which word of the last differs.
        """
        words = self.integers(-9, 9, (rows, 20))[:, 4 : 4 + len(Word)]
        parts = words.view(own, -1, len(Word)) if own > 1 else words[None]
        parts[..., :CHECKED] = parts[:, :1, :CHECKED].clone()
        parts[..., Word.FLAGS] = 0
        mine = parts[:, 0].clone()
        if isinstance(heard, tuple):
            words[-1, heard[0]] += 1
        else:
            words[0, Word.FLAGS] |= heard & 32
            words[-1, Word.FLAGS] |= heard & ~32
        return words, mine

    def column(self, which: Coef) -> Array:
        """A coefficient of each element."""
        return self.by_element(self.coef[self.places.block_tensor, which])

    def denom(self, v: Array, inside: bool) -> Array:
        """What a step is divided by, of each element."""
        corrected, eps = v * self.column(Coef.RSQRT_BIAS2) ** 2, self.column(Coef.EPS)
        return np.sqrt(corrected + eps) if inside else np.sqrt(corrected) + eps

    def by_element(self, per_block: Tensor) -> Array:
        return np.repeat(wide(per_block), self.layout.block_size)

    def flat(self, tensors: Sequence[Tensor]) -> Array:
        """Tensors laid side by side, zeros between them; an empty one is zeros."""
        line = np.zeros(self.layout.numel)
        for i, tensor in enumerate(tensors):
            offset = self.layout.offset(i)
            line[offset : offset + tensor.numel()] = wide(tensor)
        return line


def wide(tensor: Tensor) -> Array:
    """A copy in float64."""
    return tensor.detach().reshape(-1).double().numpy().copy()


def coefficients(tensors: int) -> Tensor:
    """Each tensor's row, other than the others'."""
    coef, vary = torch.zeros(tensors, len(Coef)), 1 + torch.arange(tensors) / 10
    coef[:, Coef.BETA1], coef[:, Coef.ONE_MINUS_BETA1] = 1 - 0.1 / vary, 0.1 / vary
    coef[:, Coef.BETA2], coef[:, Coef.ONE_MINUS_BETA2] = 1 - 0.02 / vary, 0.02 / vary
    coef[:, Coef.STEP_SIZE], coef[:, Coef.DECAY] = 0.03 * vary, 1 - 0.01 * vary
    coef[:, Coef.RSQRT_BIAS2], coef[:, Coef.EPS], coef[:, Coef.UNIT] = 1.5 * vary, 1e-3 * vary, 2.5 / vary
    coef[:, Coef.LR], coef[:, Coef.UNBIAS1], coef[:, Coef.WEIGHT_DECAY] = 0.02 * vary, 1.2 * vary, 0.1 / vary
    coef[:, Coef.C_MIN], coef[:, Coef.C_MAX], coef[:, Coef.BETA3] = 0.5 / vary, 2.0 * vary, 1 - 0.1 / vary
    coef[:, Coef.GRAD_LIMIT], coef[:, Coef.GLOBAL_RATIO] = 1e19 * vary, (vary - 1) / 2
    coef[:, Coef.R_MIN], coef[:, Coef.R_MAX], coef[:, Coef.R_THRESHOLD] = 0.5 / vary, 4.0 * vary, 0.1 * vary
    coef[1::2, Coef.R_THRESHOLD] = 100.0  # nothing limits the change
    return coef


class Known(dict[str, int]):
    """What names of sizes stand for; those of a noun by what they are without the name of the argument."""

    def __missing__(self, name: str) -> int:
        return self[name.partition("_")[2]] if name else super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


class Making:
    """An op's arguments, made one after the other; what rules are called with.

    Attributes:
        p: Of which they are.
        server: Whether the op works on a chunk, ``p.own``; ``blocks``, ``elements``: those it works on.
        heard: What headers that arrived say; see ``Problem.headers``.
        asked: What is not yet made of what was asked for.
        done: What is made, by flat names.
        flat: The name of what is being made; ``dtype``: its own, ``wanted``: another that was asked for.
        exponents: Of what is kept in codes, by flat names.
    """

    def __init__(self, p: Problem, op: str, asked: Mapping[str, Any]) -> None:
        self.p, self.op, self.asked = p, OPS[op], dict(asked)
        self.done: dict[str, Any] = {}
        self.exponents: dict[str, Tensor] = {}
        self.heard, self.server = self.asked.pop("heard", 0), self.asked.pop("server", op in rules.SERVERS)
        self.blocks, self.elements = p.own if self.server else (slice(None), slice(None))
        chunks, blocks = p.layout.world_size, len(p.table.row[self.blocks])
        self.known = Known(T=len(p.layout.sizes), W=chunks, M=chunks, R=1 if self.server else chunks, B=blocks)
        self.known |= {"N": p.parts, "parts": p.parts, "block_size": p.layout.block_size}
        self.known |= {"n": p.layout.numel, "stride": p.layout.chunk_bytes}

    def arguments(self) -> Any:
        """Return them."""
        signature = self.op.signature
        values = [
            self._noun(name, noun) if (noun := signature._nouns.get(name)) else self._slot(name)
            for name in signature.whole.parameters
        ]
        if self.asked:
            raise TypeError(f"{self.op.name} has no {', '.join(self.asked)}: it has {', '.join(self.op.arguments)}")
        return arguments_of(self.op.name, values)

    def keeps(self, name: str) -> Any:
        """Return what is made of an argument, or is asked for; None if there is none."""
        return self.done.get(name, self.asked.get(name))

    @property
    def shape(self) -> list[int]:
        """Return that of the tensor that is being made."""
        shapes = self.op.arguments[self.flat].shapes
        of_planes = self.p.ternary and len(shapes) == 2 and {"2", "3"} & {size.text for size in shapes[1]}
        return [size.of(self.known) for size in shapes[bool(of_planes)]]

    @property
    def dtype(self) -> torch.dtype:
        return self.op.arguments[self.flat].spec.dtypes[0]

    def kept(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return numbers as they are kept in another dtype; of codes keep the exponents."""
        if dtype is not CODES or x.dtype is not torch.float32:
            return x.to(dtype)
        codes, blocks = torch.empty_like(x, dtype=CODES), len(x) // self.p.layout.block_size
        self.exponents[self.flat] = torch.empty(blocks, dtype=CODES)
        keep_nearest(x, codes, self.exponents[self.flat], signed="_sq" not in self.flat)
        return codes

    def _noun(self, name: str, noun: Any) -> Any:
        flats = dict(zip(noun.kind._fields, list(self.op.arguments)[noun.first :], strict=False))
        asked, some = self.asked.pop(name, None), any(flat in self.asked for flat in flats.values())
        if asked is not None and asked is not ...:
            self.done |= {flats[field]: value for field, value in asked._asdict().items()}
            return asked
        if noun.optional and asked is None and not some and not self._follows(name):
            return None
        rule, hints = self._rule(name, rules.NOUNS), get_type_hints(noun.kind)
        made = rule(self)._asdict() if rule else {}
        self.done |= {flat: made[field] for field, flat in flats.items() if field in made}
        if asked is ...:
            self.done[name] = ...
        values = []
        for field, flat in flats.items():
            ready = field in made and flat not in self.asked
            values.append(made[field] if ready else self._slot(flat, type(None) in get_args(hints[field])))
        return noun.kind(*values)

    def _rule(self, name: str, of: Mapping[str, Any] = rules.RULES) -> Any:
        return of.get(f"{self.op.name}.{name}", of.get(name))

    def _follows(self, name: str) -> bool:
        """Tell whether an argument that may be left out is there because others are."""
        follows = self._rule(name, rules.FOLLOWS)
        return follows is not None and bool(follows(self))

    def _slot(self, flat: str, optional: bool = False) -> Any:
        """Make a slot's value, unless that may be left out, and nobody asks for it."""
        slot, self.flat = self.op.arguments[flat], flat
        optional |= slot.schema == "Tensor?" and flat in self.op.signature.whole.parameters
        asked = self.asked.pop(flat, ... if not optional or self._follows(flat) else None)
        if asked is ...:
            asked = self._rule(flat, rules.NUMBERS)
            asked = ... if asked is None or self._rule(flat) else asked
        self.done[flat] = value = self._value(slot, asked)
        return value

    def _value(self, slot: Any, asked: Any) -> Any:
        rule = self._rule(self.flat)
        if slot.spec is None and asked is ...:
            return rule(self) if rule else slot.default if isinstance(slot.default, int | float) else 0
        if slot.spec is None or asked is None or isinstance(asked, Tensor):
            return asked
        if isinstance(asked, int | float | tuple):
            filled = isinstance(asked, int | float)
            return torch.full(self.shape, asked, dtype=self.dtype) if filled else torch.tensor(asked, dtype=self.dtype)
        self.wanted = None if asked is ... else asked
        x = rule(self) if rule else self._usual()
        return x if asked is ... or x.dtype is asked else self.kept(x, asked)

    def _usual(self) -> Tensor:
        """Return a tensor of which no more is known: of what is written all that must not stay."""
        if self.dtype.is_floating_point:
            written = self.flat in self.op.writes
            return torch.full(self.shape, torch.nan, dtype=self.dtype) if written else self.p.normal(*self.shape)
        if self.dtype is CODES:
            return self.p.integers(0, 256, self.shape, CODES)
        return torch.zeros(self.shape, dtype=self.dtype)
