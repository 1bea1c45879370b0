"""A layout of more than 2^31 elements: indices and offsets must not wrap.

One tensor alone is longer than 2^31, a second lies behind it. Samples at the start, across 2^31 and
at the far end are compared with eager torch, run on slices.
"""

from __future__ import annotations

from collections.abc import Iterator

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


class Far:
    """Arguments of the ops over the whole index space, made on the device."""

    def __init__(self, device: torch.device, far: int) -> None:
        self.device = device
        self.layout = FlatLayout((far + 100 * BLOCK + 7, 5000), 1, BLOCK)
        self.end = self.layout.first_block[-1]
        tables = self.layout.block_tensor().to(device, torch.int32), live_table(self.layout).to(device)
        self.places = Places.of(self.layout, *tables)
        blocks = self.layout.n_blocks
        self.coef = torch.full((2, len(Coef)), 0.5, device=device)
        self.coef[:, Coef.UNIT], self.coef[:, Coef.GRAD_LIMIT] = 1.5, 1e19
        self.scale = torch.rand(blocks, device=device) + 0.5
        self.bits = torch.randint(256, (1, self.layout.chunk_bytes), dtype=torch.uint8, device=device)
        self.skip = torch.zeros(1, dtype=torch.int32, device=device)
        self.partials = torch.full((2, blocks), torch.nan, dtype=torch.float64, device=device)

    def tensors(self) -> list[Tensor]:
        return [torch.randn(n, device=self.device, dtype=torch.bfloat16) for n in self.layout.sizes]

    def line(self) -> Tensor:
        """float32 [P]; positive, so that it can be a variance, and zero in the padding."""
        x = torch.rand(self.layout.numel, device=self.device)
        x.view(-1, BLOCK)[self.end :] = 0.0
        for i, size in enumerate(self.layout.sizes):
            x[self.layout.offset(i) + size : self.layout.first_block[i + 1] * BLOCK] = 0.0
        return x

    def samples(self, far: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Ranges of blocks, and the sizes of the tensors that a layout of just these has."""
        boundary = far // BLOCK
        for first in (0, boundary - SAMPLE // 2, self.end - SAMPLE):
            blocks = slice(first, first + SAMPLE)
            spans = self.layout.spans(first * BLOCK, (first + SAMPLE) * BLOCK)
            yield blocks, tuple(span.stop - span.start for span in spans)

    def places_at(self, blocks: slice, sizes: tuple[int, ...]) -> Places:
        """Those of a layout of just these blocks, of one tensor."""
        owner = torch.zeros(SAMPLE, dtype=torch.int32, device=self.device)
        return self.places.at(blocks)._replace(sizes=sizes, block_tensor=owner)

    def cut(self, tensors: list[Tensor], blocks: slice) -> list[Tensor]:
        spans = self.layout.spans(blocks.start * BLOCK, blocks.stop * BLOCK)
        return [tensors[s.tensor][s.start : s.stop].clone() for s in spans]


def flat(x: Tensor, blocks: slice, block: int = BLOCK) -> Tensor:
    return x[blocks.start * block : blocks.stop * block].clone()


@pytest.fixture
def far(device: torch.device, small_only: bool) -> Iterator[int]:
    if small_only:
        yield 2 * SAMPLE * BLOCK
        return
    free, _ = torch.cuda.mem_get_info()
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free device memory, there are {free >> 30}")
    yield FAR
    torch.cuda.empty_cache()


def compare(found: Tensor, expected: Tensor) -> None:
    if expected.dtype is torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)
    else:
        assert torch.equal(found, expected)


def test_momentum_compress_past_2_to_the_31(device, far):
    a = Far(device, far)
    grads, c = a.tensors(), a.line()
    written = torch.empty_like(a.bits)
    before = [(flat(c, blocks), self_scale(a, blocks)) for blocks, _ in a.samples(far)]
    with using("triton"):
        triton_kernels.momentum_compress(
            *(grads, a.places, Compensated(c, a.scale), Signs(a.bits, a.scale), a.coef),
            *(None, written, a.partials, a.skip.clone(), a.skip),
        )
    for (blocks, sizes), (old, scale) in zip(a.samples(far), before, strict=True):
        bits = torch.zeros(1, SAMPLE * BLOCK // 8, dtype=torch.uint8, device=device)
        partials = torch.zeros(2, SAMPLE, dtype=torch.float64, device=device)
        with using("plain"):
            triton_kernels.momentum_compress(
                *(a.cut(grads, blocks), a.places_at(blocks, sizes), Compensated(old, scale)),
                *(Signs(flat(a.bits[0], blocks, BLOCK // 8)[None], scale), a.coef, None),
                *(bits, partials, a.skip.clone(), a.skip),
            )
        compare(flat(c, blocks), old)
        compare(flat(written[0], blocks, BLOCK // 8), bits[0])
        compare(a.partials[:, blocks].clone(), partials)


def self_scale(a: Far, blocks: slice) -> Tensor:
    return a.scale[blocks].clone()


def test_server_reduce_past_2_to_the_31(device, far):
    a = Far(device, far)
    c, written = a.line(), torch.empty_like(a.bits)
    slot = torch.zeros(a.layout.n_blocks, dtype=torch.int32, device=device)
    arrived = torch.full((1, 1), 0.75, device=device)
    words = torch.zeros(1, 8, dtype=torch.int32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    before = [flat(c, blocks) for blocks, _ in a.samples(far)]
    with using("triton"):
        triton_kernels.server_reduce(
            *(Sent(a.bits, arrived, *words, slot), a.places, Compensated(c, a.scale), written, a.partials, a.skip),
            *(a.skip.clone(), words[0].clone()),
        )
    for (blocks, _), old in zip(a.samples(far), before, strict=True):
        bits = torch.zeros(1, SAMPLE * BLOCK // 8, dtype=torch.uint8, device=device)
        partials = torch.zeros(2, SAMPLE, dtype=torch.float64, device=device)
        with using("plain"):
            triton_kernels.server_reduce(
                Sent(flat(a.bits[0], blocks, BLOCK // 8)[None], arrived, *words, slot[blocks]),
                a.places.at(blocks),
                *(Compensated(old, self_scale(a, blocks)), bits, partials, a.skip, a.skip.clone()),
                words[0].clone(),
            )
        compare(flat(c, blocks), old)
        compare(flat(written[0], blocks, BLOCK // 8), bits[0])
        compare(a.partials[:, blocks].clone(), partials)


def test_apply_momentum_past_2_to_the_31(device, far):
    a = Far(device, far)
    params, v = a.tensors(), a.line()
    before = [a.cut(params, blocks) for blocks, _ in a.samples(far)]
    with using("triton"):
        how = (Signs(a.bits, a.scale), Divisor(v, None, False), a.coef, a.skip, None)
        triton_kernels.apply_momentum(params, a.places, *how)
    for (blocks, sizes), old in zip(a.samples(far), before, strict=True):
        bits = flat(a.bits[0], blocks, BLOCK // 8)[None]
        with using("plain"):
            triton_kernels.apply_momentum(
                *(old, a.places_at(blocks, sizes), Signs(bits, self_scale(a, blocks))),
                Divisor(flat(v, blocks), None, False),
                *(a.coef, a.skip, None),
            )
        for found, expected in zip(a.cut(params, blocks), old, strict=True):
            compare(found, expected)


def test_adam_update_and_flatten_past_2_to_the_31(device, far):
    a = Far(device, far)
    params, out = a.tensors(), torch.empty(a.layout.numel + TAIL, device=device)
    out[-TAIL:] = 0.0
    with using("triton"):
        triton_kernels.flatten(params, a.layout.sizes, BLOCK, 1.0, None, out)
    for blocks, _ in a.samples(far):
        spans = a.layout.spans(blocks.start * BLOCK, blocks.stop * BLOCK)
        for span, values in zip(spans, a.cut(params, blocks), strict=True):
            assert torch.equal(out[span.flat : span.flat + span.stop - span.start], values.float())
    m, v = a.line(), a.line()
    before = [(a.cut(params, blocks), flat(m, blocks), flat(v, blocks)) for blocks, _ in a.samples(far)]
    with using("triton"):
        triton_kernels.adam_update(*(params, a.layout.cut(out), a.places, Moments(m, v), a.coef, a.skip, None, None))
    for (blocks, sizes), (old, old_m, old_v) in zip(a.samples(far), before, strict=True):
        with using("plain"):
            triton_kernels.adam_update(
                *(old, FlatLayout(sizes, 1, BLOCK).cut(flat(out, blocks)), a.places_at(blocks, sizes)),
                Moments(old_m, old_v),
                *(a.coef, a.skip, None, None),
            )
        compare(flat(m, blocks), old_m)
        compare(flat(v, blocks), old_v)
        for found, expected in zip(a.cut(params, blocks), old, strict=True):
            compare(found, expected)


def test_lamb_update_coefficient_and_move_past_2_to_the_31(device, far):
    # 31 GB: parameters, gradients, m, v.
    a = Far(device, far)
    params, grad, m, v = a.tensors(), a.line(), a.line(), a.line()
    norms = torch.zeros(2, a.layout.n_blocks, dtype=torch.float64, device=device)
    rest = (a.coef, a.skip)
    before = [(a.cut(params, blocks), flat(m, blocks), flat(v, blocks)) for blocks, _ in a.samples(far)]
    with using("triton"):
        triton_kernels.lamb_update(params, a.layout.cut(grad), a.places, Moments(m, v), False, *rest, None, norms)
    for (blocks, sizes), (old, old_m, old_v) in zip(a.samples(far), before, strict=True):
        some = torch.zeros(2, SAMPLE, dtype=torch.float64, device=device)
        with using("plain"):
            grads, places = FlatLayout(sizes, 1, BLOCK).cut(flat(grad, blocks)), a.places_at(blocks, sizes)
            triton_kernels.lamb_update(old, grads, places, Moments(old_m, old_v), False, *rest, None, some)
        compare(flat(m, blocks), old_m)
        compare(flat(v, blocks), old_v)
        compare(norms[:, blocks].clone(), some)

    # Over millions of blocks: the float64 sums differ in order, what is rounded to float32 by a unit at most.
    start = torch.tensor([*a.layout.first_block[:-1], a.layout.n_blocks], device=device)
    outcomes = []
    for backend in ("plain", "triton"):
        coef, layers = a.coef.clone(), torch.ones(len(Layer), 2, device=device)
        coef[:, Coef.C_MAX] = 10.0
        with using(backend):
            triton_kernels.lamb_coefficient(norms, start, a.skip, False, coef, layers)
        outcomes.append((coef, layers))
    for expected, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-23, atol=0.0)

    with using("triton"):
        triton_kernels.lamb_move(params, a.places, Moments(m, v), False, *rest, None)
    for (blocks, sizes), (old, old_m, old_v) in zip(a.samples(far), before, strict=True):
        with using("plain"):
            triton_kernels.lamb_move(old, a.places_at(blocks, sizes), Moments(old_m, old_v), False, *rest, None)
        for found, expected in zip(a.cut(params, blocks), old, strict=True):
            compare(found, expected)


@pytest.mark.parametrize(("started", "deepspeed"), [(1, False), (0, True)])
def test_lamb_ratio_and_rescale_past_2_to_the_31(device, far, started, deepspeed):
    # 22 GB: parameters, both variances, two rows of bits.
    a = Far(device, far)
    params, frozen, fresh = a.tensors(), a.line(), a.line()
    last_bits = torch.randint(256, a.bits.shape, dtype=torch.uint8, device=device)
    last_scale = torch.rand(a.layout.n_blocks, device=device) + 0.5
    begun = torch.full((1,), started, dtype=torch.int32, device=device)
    largest = torch.full((a.layout.n_blocks,), torch.nan, device=device)
    norms = torch.full((2, a.layout.n_blocks), torch.nan, dtype=torch.float64, device=device)
    before = [
        (flat(fresh, blocks), flat(last_bits[0], blocks, BLOCK // 8)[None], last_scale[blocks].clone())
        for blocks, _ in a.samples(far)
    ]
    with using("triton"):
        triton_kernels.lamb_ratio(
            *(params, a.places, Signs(a.bits, a.scale), Signs(last_bits, last_scale)),
            *(Divisor(frozen, None, False), fresh, begun, False, deepspeed, a.coef, a.skip),
            Ratios(largest, norms),
        )
    for (blocks, sizes), (old, old_bits, old_scale) in zip(a.samples(far), before, strict=True):
        some, some_norms = (
            torch.zeros(SAMPLE, device=device),
            torch.zeros(2, SAMPLE, dtype=torch.float64, device=device),
        )
        bits = flat(a.bits[0], blocks, BLOCK // 8)[None]
        with using("plain"):
            triton_kernels.lamb_ratio(
                *(a.cut(params, blocks), a.places_at(blocks, sizes), Signs(bits, self_scale(a, blocks))),
                *(Signs(old_bits, old_scale), Divisor(flat(frozen, blocks), None, False), old, begun, False, deepspeed),
                *(a.coef, a.skip, Ratios(some, some_norms)),
            )
        compare(flat(fresh, blocks), old)
        compare(flat(last_bits[0], blocks, BLOCK // 8), old_bits[0])
        compare(last_scale[blocks].clone(), old_scale)
        compare(largest[blocks].clone(), some)
        compare(norms[:, blocks].clone(), some_norms)

    start = torch.tensor([*a.layout.first_block[:-1], a.layout.n_blocks], device=device)
    outcomes = []
    for backend in ("plain", "triton"):
        coef, layers = a.coef.clone(), torch.ones(len(Layer), 2, device=device)
        coef[:, Coef.R_MAX] = coef[:, Coef.R_THRESHOLD] = 1e9
        with using(backend):
            triton_kernels.lamb_rescale(largest, norms, start, a.skip, deepspeed, begun.clone(), coef, layers)
        outcomes.append((coef, layers))
    for expected, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-23, atol=0.0)


def test_pack_and_unpack_past_2_to_the_31(device, far):
    x = torch.randn(far + 4096 + 8, device=device, dtype=torch.bfloat16)
    with using("triton"):
        bits = triton_kernels.pack(x)
        signs = triton_kernels.unpack(bits, torch.bfloat16)
    for start in (0, far - 4096, len(x) - 4096):
        part = slice(start, start + 4096)
        with using("plain"):
            assert torch.equal(bits[part.start // 8 : part.stop // 8], triton_kernels.pack(x[part]))
        assert torch.equal(signs[part] > 0, x[part] >= 0)
    assert int((signs > 0).sum()) == int((x >= 0).sum())
