"""A layout of more than 2^31 elements: indices and offsets must not wrap.

One tensor alone is longer than 2^31, a second lies behind it. Samples at the start, across 2^31 and
at the far end are compared with eager torch, run on slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedonebit import triton_kernels
from fusedonebit.triton_kernels import TAIL, Coef, FlatLayout, Layer, live_table, using
from fusedonebit.triton_kernels.nouns import Compensated, Divisor, Moments, Places, Ratios, Sent, Signs

BLOCK = 1024
SAMPLE = 64  # blocks
FAR = 2**31
NEEDED = 48 << 30  # bytes free
Values = SimpleNamespace
Call = Callable[[Values, Places, FlatLayout], None]


class Far:
    """Arguments of the ops over the whole index space, made on the device."""

    def __init__(self, device: torch.device, boundary: int) -> None:
        self.device, self.boundary = device, boundary
        self.layout = FlatLayout((boundary + 100 * BLOCK + 7, 5000), 1, BLOCK)
        self.end = self.layout.first_block[-1]
        tables = self.layout.block_tensor().to(device, torch.int32), live_table(self.layout).to(device)
        self.places = Places.of(self.layout, *tables)
        self.coef = torch.full((2, len(Coef)), 0.5, device=device)
        self.coef[:, Coef.UNIT], self.coef[:, Coef.GRAD_LIMIT] = 1.5, 1e19

    def values(self, **more: Any) -> Values:
        """What all ops take, and more."""
        return Values(coef=self.coef, skip=torch.zeros(1, dtype=torch.int32, device=self.device), **more)

    def compressed(self, **more: Any) -> Values:
        """What ops on bits take, and more."""
        flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self.values(scale=self.scales(), bits=self.signs(), flags=flags, **more)

    def tensors(self) -> list[Tensor]:
        return [torch.randn(n, device=self.device, dtype=torch.bfloat16) for n in self.layout.sizes]

    def scales(self) -> Tensor:
        return torch.rand(self.layout.n_blocks, device=self.device) + 0.5

    def sums(self) -> Tensor:
        return torch.full((2, self.layout.n_blocks), torch.nan, dtype=torch.float64, device=self.device)

    def signs(self) -> Tensor:
        return torch.randint(256, (1, self.layout.chunk_bytes), dtype=torch.uint8, device=self.device)

    def line(self) -> Tensor:
        """float32 [P]; positive, so that it can be a variance, and zero in the padding."""
        x = torch.rand(self.layout.numel, device=self.device)
        x.view(-1, BLOCK)[self.end :] = 0.0
        for i, size in enumerate(self.layout.sizes):
            x[self.layout.offset(i) + size : self.layout.first_block[i + 1] * BLOCK] = 0.0
        return x

    def samples(self) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Ranges of blocks, and the sizes of the tensors that a layout of just these has."""
        for first in (0, self.boundary // BLOCK - SAMPLE // 2, self.end - SAMPLE):
            blocks = slice(first, first + SAMPLE)
            spans = self.layout.spans(first * BLOCK, (first + SAMPLE) * BLOCK)
            yield blocks, tuple(span.stop - span.start for span in spans)

    def cut(self, value: Any, blocks: slice) -> Any:
        """What of users' tensors, or of one by tensor, element, block or bit, lies in some blocks; others whole."""
        spans = list(self.layout.spans(blocks.start * BLOCK, blocks.stop * BLOCK))
        if isinstance(value, list):
            return [value[s.tensor][s.start : s.stop].clone() for s in spans]
        if value is self.coef:
            return value[: len(spans)].clone()
        of_block = {self.layout.n_blocks: 1, self.layout.chunk_bytes: BLOCK // 8, self.layout.numel: BLOCK}
        if (each := of_block.get(value.shape[-1])) is None:
            return value.clone()
        return value[..., blocks.start * each : blocks.stop * each].clone()

    def check(self, given: Values, call: Call, one_tensor: bool = True) -> None:
        """Call an op on all, and in eager torch on samples: these must end as the same parts of all do.

        Places of a sample are those of a layout of just its blocks, of ``one_tensor`` or as they lie.
        """
        before = []
        for blocks, _ in self.samples():
            before.append(Values(**{name: self.cut(x, blocks) for name, x in vars(given).items()}))
        with using("triton"):
            call(given, self.places, self.layout)
        for (blocks, sizes), expected in zip(self.samples(), before, strict=True):
            places = self.places.at(blocks)
            if one_tensor:
                owner = torch.zeros(SAMPLE, dtype=torch.int32, device=self.device)
                places = places._replace(sizes=sizes, block_tensor=owner)
            with using("plain"):
                call(expected, places, FlatLayout(sizes, 1, BLOCK))
            for name, x in vars(expected).items():
                compare(name, self.cut(getattr(given, name), blocks), x)

    def check_layers(self, call: Callable[[Tensor, Tensor, Tensor], None], **coef: float) -> None:
        """Call an op on ``start``, coefficients and layers; over millions of blocks float64 sums differ in order, what
        is rounded to float32 by a unit at most."""
        start = torch.tensor([*self.layout.first_block[:-1], self.layout.n_blocks], device=self.device)
        outcomes = []
        for backend in ("plain", "triton"):
            table, layers = self.coef.clone(), torch.ones(len(Layer), 2, device=self.device)
            for name, value in coef.items():
                table[:, Coef[name]] = value
            with using(backend):
                call(start, table, layers)
            outcomes.append((table, layers))
        for expected, found in zip(*outcomes, strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-23, atol=0.0)


def compare(name: str, found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            compare(name, one, other)
    elif expected.dtype is torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    else:
        assert torch.equal(found, expected), name


@pytest.fixture
def far(device: torch.device, small_only: bool) -> Iterator[Far]:
    if small_only:
        yield Far(device, 2 * SAMPLE * BLOCK)
        return
    free, _ = torch.cuda.mem_get_info()
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free device memory, there are {free >> 30}")
    yield Far(device, FAR)
    torch.cuda.empty_cache()


def test_momentum_compress_past_2_to_the_31(far):
    def call(v: Values, places: Places, layout: FlatLayout) -> None:
        sides = Compensated(v.c, v.scale), Signs(v.bits, v.scale)
        triton_kernels.momentum_compress(v.grads, places, *sides, v.coef, None, v.written, v.sums, v.flags, v.skip)

    far.check(far.compressed(grads=far.tensors(), c=far.line(), written=far.signs(), sums=far.sums()), call)


def test_server_reduce_past_2_to_the_31(far):
    def call(v: Values, places: Places, layout: FlatLayout) -> None:
        sent, side = Sent(v.bits, v.arrived, v.words, v.own, v.slot), Compensated(v.c, v.scale)
        triton_kernels.server_reduce(sent, places, side, v.written, v.sums, v.skip, v.flags, v.told)

    words = torch.zeros(1, 8, dtype=torch.int32, device=far.device)
    heads = {"arrived": torch.full((1, 1), 0.75, device=far.device), "words": words, "own": words[0].clone()}
    heads |= {"slot": torch.zeros(far.layout.n_blocks, dtype=torch.int32, device=far.device), "told": words.clone()}
    far.check(far.compressed(c=far.line(), written=far.signs(), sums=far.sums(), **heads), call, one_tensor=False)


def test_apply_momentum_past_2_to_the_31(far):
    def call(v: Values, places: Places, layout: FlatLayout) -> None:
        how = Signs(v.bits, v.scale), Divisor(v.variance, None, False)
        triton_kernels.apply_momentum(v.params, places, *how, v.coef, v.skip, None)

    far.check(far.compressed(params=far.tensors(), variance=far.line()), call)


def test_adam_update_and_flatten_past_2_to_the_31(far):
    def call(v: Values, places: Places, layout: FlatLayout) -> None:
        grads, moments = layout.cut(v.grad), Moments(v.m, v.v)
        triton_kernels.adam_update(v.params, grads, places, moments, v.coef, v.skip, None, None)

    params, out = far.tensors(), torch.empty(far.layout.numel + TAIL, device=far.device)
    out[-TAIL:] = 0.0
    with using("triton"):
        triton_kernels.flatten(params, far.layout.sizes, BLOCK, 1.0, None, out)
    for blocks, _ in far.samples():
        spans = far.layout.spans(blocks.start * BLOCK, blocks.stop * BLOCK)
        for span, values in zip(spans, far.cut(params, blocks), strict=True):
            assert torch.equal(out[span.flat : span.flat + span.stop - span.start], values.float())
    far.check(far.values(params=params, grad=out[:-TAIL], m=far.line(), v=far.line()), call)


def test_lamb_update_coefficient_and_move_past_2_to_the_31(far):
    def update(v: Values, places: Places, layout: FlatLayout) -> None:
        rest = Moments(v.m, v.v), False, v.coef, v.skip, None, v.sums
        triton_kernels.lamb_update(v.params, layout.cut(v.grad), places, *rest)

    def move(v: Values, places: Places, layout: FlatLayout) -> None:
        triton_kernels.lamb_move(v.params, places, Moments(v.m, v.v), False, v.coef, v.skip, None)

    def coefficient(start: Tensor, coef: Tensor, layers: Tensor) -> None:
        triton_kernels.lamb_coefficient(given.sums, start, given.skip, False, coef, layers)

    # 31 GB: parameters, gradients, m, v.
    given = far.values(params=far.tensors(), grad=far.line(), m=far.line(), v=far.line(), sums=far.sums())
    far.check(given, update)
    far.check_layers(coefficient, C_MAX=10.0)
    far.check(given, move)


@pytest.mark.parametrize(("started", "deepspeed"), [(1, False), (0, True)])
def test_lamb_ratio_and_rescale_past_2_to_the_31(far, started, deepspeed):
    def ratio(v: Values, places: Places, layout: FlatLayout) -> None:
        signs = Signs(v.bits, v.scale), Signs(v.last_bits, v.last_scale)
        triton_kernels.lamb_ratio(
            *(v.params, places, *signs, Divisor(v.frozen, None, False), v.fresh, v.begun, False, deepspeed),
            *(v.coef, v.skip, Ratios(v.largest, v.sums)),
        )

    def rescale(start: Tensor, coef: Tensor, layers: Tensor) -> None:
        begun = given.begun.clone()
        triton_kernels.lamb_rescale(given.largest, given.sums, start, given.skip, deepspeed, begun, coef, layers)

    # 22 GB: parameters, both variances, two rows of bits.
    last = {"last_bits": far.signs(), "last_scale": far.scales()}
    last |= {"largest": torch.full((far.layout.n_blocks,), torch.nan, device=far.device)}
    begun = torch.full((1,), started, dtype=torch.int32, device=far.device)
    variances = {"frozen": far.line(), "fresh": far.line(), "sums": far.sums()}
    given = far.compressed(params=far.tensors(), begun=begun, **variances, **last)
    far.check(given, ratio)
    far.check_layers(rescale, R_MAX=1e9, R_THRESHOLD=1e9)


def test_pack_and_unpack_past_2_to_the_31(far):
    x = torch.randn(far.boundary + 4096 + 8, device=far.device, dtype=torch.bfloat16)
    with using("triton"):
        bits = triton_kernels.pack(x)
        signs = triton_kernels.unpack(bits, torch.bfloat16)
    for start in (0, far.boundary - 4096, len(x) - 4096):
        part = slice(start, start + 4096)
        with using("plain"):
            assert torch.equal(bits[part.start // 8 : part.stop // 8], triton_kernels.pack(x[part]))
        assert torch.equal(signs[part] > 0, x[part] >= 0)
    assert int((signs > 0).sum()) == int((x >= 0).sum())
