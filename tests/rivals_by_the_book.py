"""The lab's rivals as their papers and libraries have them: one worker at a time, in float64, nothing shared with ours.

Each function takes the run (``Run``) and yields the parameters after each step; a list has an entry for each worker.
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
    """torch's ``_compress_hook``: ``tensor.to(bfloat16).div_(world_size)``, an all-reduce, back."""
    x, adam = run.x, AdamW()
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        total = (gs[0].bfloat16() / run.workers).bfloat16()
        for g in gs[1:]:
            total = (total.float() + (g.bfloat16() / run.workers).float()).bfloat16()
        x = adam(x, total.double(), lr, run.weight_decay)
        yield x


def rounded(block: Tensor, bits: int) -> Tensor:
    """A block after its way through ``bits``: integers times absmax / (2^(bits-1) - 1), which travels as float32."""
    scale = (block.abs().max() / (2 ** (bits - 1) - 1)).float().double()
    return (block / scale).round() * scale if scale > 0 else block * 0


def rounded_by_blocks(chunk: Tensor, blocks: int, bits: int) -> Tensor:
    size = ceil(len(chunk) / blocks)
    return torch.cat([rounded(chunk[i : i + size], bits) for i in range(0, len(chunk), size)])


class TwoSided:
    """Quantised all-to-all, mean, quantised all-gather; each worker and each server keeps its error."""

    def __init__(self, numel: int, workers: int, bits: int) -> None:
        self.bits, self.workers, self.blocks = bits, workers, ceil(numel / workers / 512)
        self.chunk = self.blocks * ceil(numel / workers / self.blocks)
        self.padded = torch.zeros(self.chunk * workers, dtype=torch.float64)
        self.e = [self.padded.clone() for _ in range(workers)]
        self.servers = [torch.zeros(self.chunk, dtype=torch.float64) for _ in range(workers)]

    def __call__(self, rows: list[Tensor]) -> Tensor:
        arrived = [[] for _ in range(self.workers)]
        for w, row in enumerate(rows):
            c = self.padded.clone()
            c[: len(row)] = row
            c = c + self.e[w]
            sent = torch.cat([rounded_by_blocks(part, self.blocks, self.bits) for part in c.split(self.chunk)])
            self.e[w] = c - sent
            for server, part in enumerate(sent.split(self.chunk)):
                arrived[server].append(part)
        result = []
        for server, parts in enumerate(arrived):
            c = sum(parts) / self.workers + self.servers[server]
            served = rounded_by_blocks(c, self.blocks, self.bits)
            self.servers[server] = c - served
            result.append(served)
        return torch.cat(result)[: len(rows[0])]


def quantised(run: Run, bits: int) -> Iterator[Tensor]:
    x, adam, mean = run.x, AdamW(), TwoSided(len(run.x), run.workers, bits)
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        x = adam(x, mean(list(gs)), lr, run.weight_decay)
        yield x


def round_ends(run: Run, length: int) -> Iterator[bool]:
    """A round ends after ``length`` steps, and where the lab evaluates."""
    evaluated, since = [int(share * run.steps) for share in (0.92, 0.94, 0.96, 0.98, 1.0)], 0
    for t in range(1, run.steps + 1):
        since += 1
        ends = since == length or t in evaluated
        since = 0 if ends else since
        yield ends


def diloco(run: Run, length: int, outer: tuple[float, float], bits: int | None) -> Iterator[Tensor]:
    """DiLoCo, Algorithm 1; OuterOpt as ``torch.optim.SGD(nesterov=True)``."""
    theta, xs = run.x, [run.x] * run.workers
    inner, momentum, (lr_out, mu) = [AdamW() for _ in xs], torch.zeros_like(run.x), outer
    two_sided = TwoSided(len(run.x), run.workers, bits) if bits else None
    for gs, lr, ends in zip(run.gradients, run.lrs, round_ends(run, length), strict=True):
        xs = [opt(x, g, lr, run.weight_decay) for opt, x, g in zip(inner, xs, gs, strict=True)]
        if ends:
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


def powersgd(run: Run, rank: int, seed: int) -> Iterator[Tensor]:
    """PowerSGD, Algorithms 1 and 2; all is averaged as it is in the first ten steps."""
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
        if t >= 10:
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


def top_k_in_two_bits(tensor: Tensor, k: int) -> Tensor:
    """The largest ``k`` of 4096 of each chunk, a share of smaller chunks, all a tensor's values in two bits."""
    chunks = ceil(len(tensor) / 4096)
    size = ceil(len(tensor) / chunks)
    padded = torch.cat([tensor, tensor.new_zeros(chunks * size - len(tensor))])
    places = []
    for i in range(chunks):
        chunk = padded[i * size : (i + 1) * size]
        places += [i * size + place for place in largest(chunk, max(1, round(k * size / 4096)))]
    sent = torch.zeros_like(padded)
    sent[places] = in_two_bits(padded[places])
    return sent[: len(tensor)]


def sparseloco(run: Run, length: int, k: int) -> Iterator[Tensor]:
    """SparseLoCo, Algorithm 1, beta = 0.95 and alpha = 1."""
    theta, xs = run.x, [run.x] * run.workers
    inner, errors = [AdamW() for _ in xs], [torch.zeros_like(run.x) for _ in xs]
    for gs, lr, ends in zip(run.gradients, run.lrs, round_ends(run, length), strict=True):
        xs = [opt(x, g, lr, run.weight_decay) for opt, x, g in zip(inner, xs, gs, strict=True)]
        if ends:
            total = torch.zeros_like(theta)
            for w, x in enumerate(xs):
                e = 0.95 * errors[w] + (theta - x)
                sent = torch.cat([top_k_in_two_bits(e[part], k) for part in run.tensors()])
                errors[w] = e - sent
                total = total + sent
            theta = theta - total / run.workers
            xs = [theta] * run.workers
        yield torch.stack(xs)


def loco(run: Run, down: str, reset: int) -> Iterator[Tensor]:
    """LoCo: four bits of h = g + e; e <- 0.8 e + 0.2 (h - Q(h)), kept in eight bits, 0 after every ``reset`` steps."""
    master, adam, numel = run.x, AdamW(), len(run.x)
    blocks = ceil(numel / run.workers / 512)
    chunk = blocks * ceil(numel / run.workers / blocks)
    e = [[torch.zeros(chunk, dtype=torch.float64) for _ in range(run.workers)] for _ in range(run.workers)]
    server_e = [torch.zeros(chunk, dtype=torch.float64) for _ in range(run.workers)]
    for t, (gs, lr) in enumerate(zip(run.gradients, run.lrs, strict=True), 1):

        def sent(g: Tensor, e: Tensor, t: int = t) -> tuple[Tensor, Tensor]:
            h = g + e
            q = rounded_by_blocks(h, blocks, 4)
            e = 0.8 * e + 0.2 * (h - q)
            return q, rounded_by_blocks(e, blocks, 8) if t % reset else torch.zeros_like(e)

        means = []
        for server in range(run.workers):
            arrived = []
            for w, g in enumerate(gs):
                part = torch.cat([g, g.new_zeros(chunk * run.workers - numel)])[server * chunk :][:chunk]
                q, e[w][server] = sent(part, e[w][server])
                arrived.append(q)
            mean = sum(arrived) / run.workers
            if down == "gradients":
                mean, server_e[server] = sent(mean, server_e[server])
            means.append(mean)
        master = adam(master, torch.cat(means)[:numel], lr, run.weight_decay)
        yield master.bfloat16().double() if down == "parameters" else master


def distributed_lion(run: Run, aggregation: str) -> Iterator[Tensor]:
    """Distributed Lion, Algorithm 1."""
    x, ms = run.x, [torch.zeros_like(run.x) for _ in range(run.workers)]
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        deltas = [torch.sign(BETA1 * m + (1 - BETA1) * g) for m, g in zip(ms, gs, strict=True)]
        ms = [BETA2 * m + (1 - BETA2) * g for m, g in zip(ms, gs, strict=True)]
        total = sum(deltas)
        change = torch.sign(total) if aggregation == "mavo" else total / run.workers
        x = x - lr * (change + run.weight_decay * x)
        yield x


def cosine_matrix(size: int) -> Tensor:
    """DCT-II: component k of e_i is sqrt(2 / N) cos(pi / N (i + 1/2) k), and 1 / sqrt(N) where k is 0."""
    return torch.tensor(
        [[sqrt((2 if k else 1) / size) * cos(pi / size * (i + 0.5) * k) for i in range(size)] for k in range(size)],
        dtype=torch.float64,
    )


def demo_tiles(part: slice, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Places of a tensor's tiles [height, width]."""
    at = torch.arange(part.start, part.stop).view(*(shape[:1] if len(shape) > 1 else (1,)), -1)
    height, width = (max(d for d in range(1, 65) if side % d == 0) for side in at.shape)
    for row in range(0, at.shape[0], height):
        for column in range(0, at.shape[1], width):
            yield at[row : row + height, column : column + width]


def demo(run: Run, k: int) -> Iterator[Tensor]:
    """DeMo, Algorithm 1, and its authors' ``demo.py``; values travel as bfloat16."""
    x, deltas = run.x, [torch.zeros_like(run.x) for _ in range(run.workers)]
    tiles = [at for part, shape in zip(run.tensors(), run.shapes, strict=True) for at in demo_tiles(part, shape)]
    cosines = {size: cosine_matrix(size) for at in tiles for size in at.shape}
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        deltas = [0.999 * delta + lr * g for delta, g in zip(deltas, gs, strict=True)]
        update = torch.zeros_like(x)
        for at in tiles:
            rows, columns = cosines[at.shape[0]], cosines[at.shape[1]]
            sums, counts = torch.zeros(at.numel(), dtype=torch.float64), torch.zeros(at.numel())
            for delta in deltas:
                components = (rows @ delta[at] @ columns.T).flatten()
                places = largest(components, max(1, round(k * at.numel() / 4096)))
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


def scaled_signs(values: Tensor, cuts: list[int]) -> Tensor:
    """The sign of each element times the mean magnitude of its block; blocks lie between the cuts."""
    blocks = [values[a:b] for a, b in zip(cuts, [*cuts[1:], len(values)], strict=True)]
    return torch.cat([torch.where(v >= 0, 1.0, -1.0) * v.abs().mean().float().double() for v in blocks])


def ef_sgdm(run: Run) -> Iterator[Tensor]:
    """dist-EF-blockSGDM with Nesterov's momentum; a block ends with its tensor, or its server's part."""
    x, chunk, mu, last = run.x, ceil(len(run.x) / run.workers), 0.9, 0.0
    cuts = sorted({*(part.start for part in run.tensors()), *range(0, len(x), chunk)})
    ms, es = ([torch.zeros_like(x) for _ in range(run.workers)] for _ in range(2))
    server_e = torch.zeros_like(x)
    for gs, lr in zip(run.gradients, run.lrs, strict=True):
        arrived = []
        for w, g in enumerate(gs):
            g = g + run.weight_decay * x
            ms[w] = mu * ms[w] + g
            p = mu * ms[w] + g + (last / lr) * es[w]
            arrived.append(scaled_signs(p, cuts))
            es[w] = p - arrived[w]
        p = sum(arrived) / run.workers + (last / lr) * server_e
        delta = scaled_signs(p, cuts)
        server_e, last = p - delta, lr
        x = x - lr * delta
        yield x
