"""The lab's rivals a second time: one worker at a time, in float64, with loops where ours have tensors, no code shared.

Each function transcribes an algorithm of a paper, or what a library's code does. Its docstring says which, and where it
does something else: what neither says, and what the lab does alike for all. That is: AdamW (or the method's own rule)
with the lab's betas, eps and decoupled weight decay; a line of all parameters, of which each of W servers, one on each
rank, has an equal part; mean gradients, not sums. What travels is rounded as the message that carries it.

Each takes the run (``Run``) and yields the parameters after each step; a list has an entry for each worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, cos, pi, sqrt

import torch
from torch import Tensor

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8


@dataclass
class Run:
    """Parameters [n] of some shapes, each worker's gradients [steps, W, n], a learning rate for each step."""

    x: Tensor
    shapes: list[tuple[int, ...]]
    gradients: Tensor
    lrs: list[float]
    weight_decay: float

    @property
    def workers(self) -> int:
        return self.gradients.shape[1]

    @property
    def steps(self) -> int:
        return len(self.lrs)

    def tensors(self) -> list[slice]:
        ends = torch.tensor([0, *(torch.Size(shape).numel() for shape in self.shapes)]).cumsum(0).tolist()
        return [slice(*ends[i : i + 2]) for i in range(len(self.shapes))]


class AdamW:
    """Loshchilov & Hutter, Algorithm 2."""

    def __init__(self) -> None:
        self.m, self.v, self.t = 0.0, 0.0, 0

    def __call__(self, x: Tensor, g: Tensor, lr: float, weight_decay: float) -> Tensor:
        self.t += 1
        self.m = BETA1 * self.m + (1 - BETA1) * g
        self.v = BETA2 * self.v + (1 - BETA2) * g * g
        m_hat, v_hat = self.m / (1 - BETA1**self.t), self.v / (1 - BETA2**self.t)
        return x - lr * weight_decay * x - lr * m_hat / (v_hat.sqrt() + EPS)


def bf16(run: Run) -> Iterator[Tensor]:
    """torch's ``bf16_compress_hook``: ``tensor.to(bfloat16).div_(world_size)``, an all-reduce, back.

    Not torch's: the all-reduce adds in the order of ranks, and rounds each time; NCCL's order is its own.
    """
    x, adam = run.x, AdamW()
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        total = (gs[0].bfloat16() / run.workers).bfloat16()
        for g in gs[1:]:
            total = (total.float() + (g.bfloat16() / run.workers).float()).bfloat16()
        x = adam(x, total.double(), lr, run.weight_decay)
        yield x


def block_starts(run: Run, workers: int, largest: int) -> list[int]:
    """Where blocks with a scale begin: with a tensor, ``largest`` elements later in it, with a server's part."""
    numel, starts = len(run.x), set()
    for part in run.tensors():
        starts |= set(range(part.start, part.stop, largest))
    return sorted(starts | set(range(0, numel, ceil(numel / workers))))


def in_blocks(values: Tensor, starts: list[int]) -> list[Tensor]:
    return [values[a:b] for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]


def rounded(values: Tensor, starts: list[int], bits: int) -> Tensor:
    """After the way through ``bits``: integers times a block's absmax / (2^(bits-1) - 1), which travels as float32."""
    sent = []
    for block in in_blocks(values, starts):
        scale = (block.abs().max() / (2 ** (bits - 1) - 1)).float().double()
        sent.append((block / scale).round() * scale if scale > 0 else block * 0)
    return torch.cat(sent)


class TwoSided:
    """Quantised all-to-all, mean, quantised all-gather; each worker and each server keeps its error."""

    def __init__(self, run: Run, bits: int) -> None:
        self.bits, self.workers, self.starts = bits, run.workers, block_starts(run, run.workers, 512)
        self.e = [torch.zeros_like(run.x) for _ in range(run.workers)]
        self.server_e = torch.zeros_like(run.x)  # of all servers, side by side

    def __call__(self, rows: list[Tensor]) -> Tensor:
        arrived = []
        for w, row in enumerate(rows):
            c = row + self.e[w]
            arrived.append(rounded(c, self.starts, self.bits))
            self.e[w] = c - arrived[w]
        c = sum(arrived) / self.workers + self.server_e
        served = rounded(c, self.starts, self.bits)
        self.server_e = c - served
        return served


def quantised(run: Run, bits: int) -> Iterator[Tensor]:
    """The route of torchft's ``allreduce_quantized`` and of ZeRO++'s qgZ without its hierarchy.

    Not theirs: symmetric integers, a scale for each 512 elements of a tensor, errors fed back on both sides. The mean
    goes back to all in integers too, as torchft's; qgZ leaves it with its server.
    """
    x, adam, mean = run.x, AdamW(), TwoSided(run, bits)
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        x = adam(x, mean(list(gs)), lr, run.weight_decay)
        yield x


def diloco(run: Run, length: int, outer: tuple[float, float], bits: int | None) -> Iterator[Tensor]:
    """DiLoCo, Algorithm 1; OuterOpt is Nesterov's momentum as ``torch.optim.SGD(nesterov=True)`` has it.

    Not the paper's: a schedule of inner rates; differences in integers (``bits``), by ``quantised``'s all-reduce; and a
    round that the run does not complete. With an outer rate of 1 and no momentum it is local AdamW, FedAvg's means.
    """
    theta, xs = run.x, [run.x] * run.workers
    inner, momentum, (lr_out, mu) = [AdamW() for _ in xs], torch.zeros_like(run.x), outer
    two_sided = TwoSided(run, bits) if bits else None
    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True), 1):
        xs = [opt(x, g, lr, run.weight_decay) for opt, x, g in zip(inner, xs, gs, strict=True)]
        if t % length == 0:
            deltas = [theta - x for x in xs]
            delta = two_sided(deltas) if two_sided else sum(deltas) / run.workers
            momentum = mu * momentum + delta
            theta = theta - lr_out * (delta + mu * momentum)
            xs = [theta] * run.workers
        yield torch.stack(xs)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Gram-Schmidt, column by column."""
    columns = []
    for column in matrix.T:
        for before in columns:
            column = column - (before @ column) * before
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def powersgd(run: Run, rank: int, seed: int, start: int) -> Iterator[Tensor]:
    """PowerSGD, Algorithm 1, and of Algorithm 2 the error feedback: what is averaged so goes to AdamW, as torch's hook
    gives it to any optimizer, and not to the paper's momentum.

    torch's: all is averaged as it is in the first ``start`` steps, and what would not become half as large always; Q
    begins as it was drawn, and is made orthogonal when it is used.
    """
    x, adam, draw = run.x, AdamW(), torch.Generator().manual_seed(seed)
    matrices = [(part, shape[0], part.stop - part.start) for part, shape in zip(run.tensors(), run.shapes, strict=True)]
    compressed = {}
    for part, n, numel in matrices:
        m = numel // n
        if 2 * (n + m) * min(n, m, rank) < numel:
            compressed[part.start] = torch.randn(m, min(n, m, rank), generator=draw, dtype=torch.float64)
    errors = [torch.zeros_like(x) for _ in range(run.workers)]
    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True)):
        mean = sum(gs) / run.workers
        if t >= start:
            deltas = [g + e for g, e in zip(gs, errors, strict=True)]
            for part, n, _ in matrices:
                if part.start not in compressed:
                    mean[part] = sum(delta[part] for delta in deltas) / run.workers
                    continue
                ms = [delta[part].view(n, -1) for delta in deltas]
                q = orthogonalize(compressed[part.start])
                p = orthogonalize(sum(m @ q for m in ms) / run.workers)
                q = sum(m.T @ p for m in ms) / run.workers
                compressed[part.start] = q
                mean[part] = (p @ q.T).flatten()
                for e, delta in zip(errors, deltas, strict=True):
                    e[part] = delta[part] - mean[part]
        x = adam(x, mean, lr, run.weight_decay)
        yield x


def largest(values: Tensor, k: int) -> list[int]:
    listed = values.tolist()
    return sorted(range(len(listed)), key=lambda i: -abs(listed[i]))[:k]


def in_two_bits(values: Tensor) -> Tensor:
    """Four bins around the mean, 6/4 standard deviations wide; a value becomes its bin's mean, as float32."""
    centred = values - values.mean()
    width = 6 * sqrt(float(centred @ centred) / max(1, len(values) - 1)) / 4
    bins = [min(3, max(0, round(c / (width or 1.0)) + 2)) for c in centred.tolist()]
    binned = {b: [v for v, at in zip(values.tolist(), bins, strict=True) if at == b] for b in set(bins)}
    means = {b: sum(values) / len(values) for b, values in binned.items()}
    return torch.tensor([means[b] for b in bins]).double()


def tiles(part: slice, shape: tuple[int, ...], run: int) -> list[Tensor]:
    """Places of a tensor's tiles [height, width], as ``_get_smaller_split`` of DeMo's authors finds their sides.

    Not theirs: a tensor of more than two dimensions, which their code refuses, is a matrix of its first by all others.
    """
    at = torch.arange(part.start, part.stop).view(*(shape[:1] if len(shape) > 1 else (1,)), -1)
    most = 64 if len(shape) > 1 else run
    height, width = (max(d for d in range(1, most + 1) if side % d == 0) for side in at.shape)
    return [
        at[row : row + height, column : column + width]
        for row in range(0, at.shape[0], height)
        for column in range(0, at.shape[1], width)
    ]


def top_k_in_two_bits(values: Tensor, chunks: list[Tensor], k: int) -> Tensor:
    """The largest of each of a tensor's chunks, all of them in two bits; zero elsewhere."""
    places = []
    for chunk in chunks:
        at = chunk.flatten()
        places += at[largest(values[at], max(1, round(k * len(at) / 4096)))].tolist()
    sent = torch.zeros_like(values)
    sent[places] = in_two_bits(values[places])
    return sent


def sparseloco(run: Run, length: int, k: int) -> Iterator[Tensor]:
    """SparseLoCo, Algorithm 1, with beta = 0.95 and alpha = 1; 2 bits as in its authors' ``TopKCompressor``.

    The paper's and not the code's: the division by all workers, and a vector's chunks of up to 4096. The code's: where
    64 does not divide a side a divisor takes its place. Neither's: of a smaller chunk the same share as of 4096.
    """
    theta, xs = run.x, [run.x] * run.workers
    inner, errors = [AdamW() for _ in xs], [torch.zeros_like(run.x) for _ in xs]
    tensors = [tiles(part, shape, 4096) for part, shape in zip(run.tensors(), run.shapes, strict=True)]
    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True), 1):
        xs = [opt(x, g, lr, run.weight_decay) for opt, x, g in zip(inner, xs, gs, strict=True)]
        if t % length == 0:
            total = torch.zeros_like(theta)
            for w, x in enumerate(xs):
                e = 0.95 * errors[w] + (theta - x)
                sent = sum(top_k_in_two_bits(e, chunks, k) for chunks in tensors)
                errors[w] = e - sent
                total = total + sent
            theta = theta - total / run.workers
            xs = [theta] * run.workers
        yield torch.stack(xs)


def loco(run: Run, down: str, reset: int) -> Iterator[Tensor]:
    """LoCo's compensation: four bits of h = g + e; e <- 0.8 e + 0.2 (h - Q(h)), as DeepSpeed's kernel has it, in eight
    bits, as the paper has it, and 0 after every ``reset`` steps.

    "parameters": servers take AdamW's step, and send the result in bfloat16. "gradients" is neither's: the mean goes
    back by the same code. Nor is when ``reset`` comes, nor what has a scale, which is as in ``quantised``.
    """
    master, adam, starts = run.x, AdamW(), block_starts(run, run.workers, 512)
    e = [torch.zeros_like(run.x) for _ in range(run.workers)]
    server_e = torch.zeros_like(run.x)

    def sent(g: Tensor, e: Tensor, t: int) -> tuple[Tensor, Tensor]:
        h = g + e
        q = rounded(h, starts, 4)
        e = 0.8 * e + 0.2 * (h - q)
        return q, rounded(e, starts, 8) if t % reset else torch.zeros_like(e)

    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True), 1):
        arrived = []
        for w, g in enumerate(gs):
            q, e[w] = sent(g, e[w], t)
            arrived.append(q)
        mean = sum(arrived) / run.workers
        if down == "gradients":
            mean, server_e = sent(mean, server_e, t)
        master = adam(master, mean, lr, run.weight_decay)
        yield master.bfloat16().double() if down == "parameters" else master


def distributed_lion(run: Run, aggregation: str) -> Iterator[Tensor]:
    """Distributed Lion, Algorithm 1: "mavo", the sign of the sum of signs, and "avg", their mean.

    Not the paper's: in "mavo-1" a tie, whose sign is 0, is +1 in even steps and -1 in odd ones. A worker's 0 stays 0
    here; ours has one bit for it, and is compared with this where nothing is 0.
    """
    x, ms = run.x, [torch.zeros_like(run.x) for _ in range(run.workers)]
    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True), 1):
        deltas = [torch.sign(BETA1 * m + (1 - BETA1) * g) for m, g in zip(ms, gs, strict=True)]
        ms = [BETA2 * m + (1 - BETA2) * g for m, g in zip(ms, gs, strict=True)]
        total = sum(deltas)
        change = total / run.workers if aggregation == "avg" else torch.sign(total)
        if aggregation == "mavo-1":
            change[total == 0] = -1 if t % 2 else 1
        x = x - lr * (change + run.weight_decay * x)
        yield x


def cosine_matrix(size: int) -> Tensor:
    """DCT-II: component k of e_i is sqrt(2 / N) cos(pi / N (i + 1/2) k), and 1 / sqrt(N) where k is 0.

    Not the authors', whose matrices come from an FFT: a cosine that is 0 is exactly 0, and has no sign.
    """
    return torch.tensor(
        [
            [
                0.0
                if (2 * i + 1) * k % (2 * size) == size
                else sqrt((2 if k else 1) / size) * cos(pi / size * (i + 0.5) * k)
                for i in range(size)
            ]
            for k in range(size)
        ],
        dtype=torch.float64,
    )


def demo(run: Run, k: int) -> Iterator[Tensor]:
    """DeMo, Algorithm 1, as its authors' ``demo.py`` has it: each component is averaged over those who send it.

    Not theirs: values travel as bfloat16, and what that takes away stays in the momentum.
    """
    x, deltas = run.x, [torch.zeros_like(run.x) for _ in range(run.workers)]
    all_tiles = [at for part, shape in zip(run.tensors(), run.shapes, strict=True) for at in tiles(part, shape, 64)]
    cosines = {size: cosine_matrix(size) for at in all_tiles for size in at.shape}
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        deltas = [0.999 * delta + lr * g for delta, g in zip(deltas, gs, strict=True)]
        update = torch.zeros_like(x)
        for at in all_tiles:
            rows, columns = cosines[at.shape[0]], cosines[at.shape[1]]
            sums, counts = torch.zeros(at.numel(), dtype=torch.float64), torch.zeros(at.numel())
            for delta in deltas:
                components = (rows @ delta[at] @ columns.T).flatten()
                places = largest(components, min(k, at.numel()))
                q = torch.zeros_like(components)
                q[places] = components[places].bfloat16().double()
                delta[at] -= rows.T @ q.view(at.shape) @ columns
                sums[places] += q[places]
                counts[places] += 1
            mean = sums / counts.clamp(min=1)
            update[at] = rows.T @ mean.view(at.shape) @ columns
        x = x - lr * run.weight_decay * x
        x = x - lr * torch.sign(update)
        yield x


def scaled_signs(values: Tensor, starts: list[int]) -> Tensor:
    """The sign of each element times the mean magnitude of its block, which travels as float32."""
    blocks = in_blocks(values, starts)
    return torch.cat([(2.0 * (v >= 0) - 1).double() * v.abs().mean().float().double() for v in blocks])


def ef_sgdm(run: Run) -> Iterator[Tensor]:
    """dist-EF-blockSGDM (Zheng et al., Algorithm 2 with Nesterov's momentum), whose blocks are tensors.

    Not the paper's: many servers, with whose parts blocks end too; and weight decay, which the paper's algorithm has
    not: it is decoupled, so that gradients alone are compressed.
    """
    x, starts, mu, last = run.x, block_starts(run, run.workers, len(run.x)), 0.9, 0.0
    ms, es = ([torch.zeros_like(x) for _ in range(run.workers)] for _ in range(2))
    server_e = torch.zeros_like(x)
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        arrived = []
        for w, g in enumerate(gs):
            ms[w] = mu * ms[w] + g
            p = mu * ms[w] + g + (last / lr) * es[w]
            arrived.append(scaled_signs(p, starts))
            es[w] = p - arrived[w]
        p = sum(arrived) / run.workers + (last / lr) * server_e
        delta = scaled_signs(p, starts)
        server_e, last = p - delta, lr
        x = x - lr * run.weight_decay * x - lr * delta
        yield x


def onebit_loco(run: Run, length: int) -> Iterator[Tensor]:
    """Local AdamW whose differences travel in one bit both ways; 0.95 of what that takes away is added to the next.

    It has no paper; a scale is for 512 elements of a tensor, as in ``quantised``.
    """
    theta, xs, server_e = run.x, [run.x] * run.workers, torch.zeros_like(run.x)
    starts, inner, es = block_starts(run, run.workers, 512), [AdamW() for _ in xs], [torch.zeros_like(x) for x in xs]
    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True), 1):
        xs = [opt(x, g, lr, run.weight_decay) for opt, x, g in zip(inner, xs, gs, strict=True)]
        if t % length == 0:
            arrived = []
            for w, x in enumerate(xs):
                c = theta - x + 0.95 * es[w]
                arrived.append(scaled_signs(c, starts))
                es[w] = c - arrived[w]
            c = sum(arrived) / run.workers + 0.95 * server_e
            served = scaled_signs(c, starts)
            server_e, theta = c - served, theta - served
            xs = [theta] * run.workers
        yield torch.stack(xs)
