"""0/1 Adam's Algorithm 1 in float64, line by line: what tests of it compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusedonebit.triton_kernels import FlatLayout

BETAS, EPS, DECAY = (0.8, 0.9), 1e-6, 0.05


class Reference:
    """All workers and servers, in float64, over the flat index space."""

    def __init__(self, layout: FlatLayout, x: np.ndarray, live: np.ndarray, options: dict[str, Any]) -> None:
        self.layout, self.live, self.options = layout, live, {"scale_scope": "block", "variance_floor": 1e-3} | options
        self.workers = layout.world_size
        self.owner = np.repeat(layout.block_tensor().numpy(), layout.block_size)
        segments = layout.scale_segments(self.options["scale_scope"]).numpy()
        self.segment = np.repeat(segments, layout.block_size)
        chunk = np.repeat(np.arange(self.workers), layout.chunk_numel)
        self.served_segment = np.unique(self.segment + chunk * (self.segment.max() + 1), return_inverse=True)[1]
        self.x = np.stack([x] * self.workers)
        self.m, self.u = np.zeros_like(self.x), np.zeros_like(self.x)
        self.v, self.served = np.zeros_like(x), np.zeros_like(x)
        self.x_common, self.t, self.renewals = x.copy(), 0, 0
        self.sizes: list[float] = []
        self.of_bits = False
        self.kept = 1.0
        self.signs: np.ndarray | None = None
        self.bits: np.ndarray | None = None

    def denominators(self, floored: bool) -> np.ndarray:
        v_hat = self.v / (1 - BETAS[1] ** self.renewals)
        share = self.options["variance_floor"]
        if not floored or not share:
            return np.sqrt(v_hat) + EPS
        count = np.bincount(self.owner, self.live)
        mean = np.bincount(self.owner, v_hat * self.live) / np.maximum(count, 1)
        return np.sqrt(v_hat + share * mean[self.owner] + EPS**2)

    def step_size(self, lr: float) -> float:
        return lr / (1 - BETAS[0] ** (self.t + 1))

    def renew(self, g: np.ndarray, lr: float) -> None:
        """Line 15, and what our renewal is besides: AdamW's step."""
        g = g.mean(0)
        if self.of_bits:  # what it was divided by until now was floored, what it will be is not
            self.m = self.m * self.denominators(floored=False) / self.denominators(floored=True)
        self.of_bits = False
        self.renewals += 1
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.x = self.x * (1 - lr * DECAY) - self.step_size(lr) * self.m / self.denominators(floored=False)
        self.t += 1

    def move(self, g: np.ndarray, lr: float) -> None:
        """Lines 3 to 6, of all workers at once."""
        denom = self.denominators(floored=True)
        if not self.sizes:
            self.x_common, self.kept = self.x[0].copy(), 1.0
        self.m_before, self.denom = self.m, denom
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g  # line 4
        size = self.step_size(lr)
        self.x = self.x * (1 - lr * DECAY) - size * self.m / denom * self.live  # line 5
        self.u += self.m / denom if self.options["precondition"] else self.m  # line 6
        self.sizes.append(size)
        self.kept *= 1 - lr * DECAY
        self.t += 1

    def ahead(self) -> dict[str, np.ndarray]:
        """Before a round's last step, which then only brings a gradient: u has what is left of m, and m is older."""
        left = BETAS[0] * self.m
        return {"u": self.u + (left / self.denom if self.options["precondition"] else left), "m": self.m_before}

    def synchronise(self) -> None:
        """Lines 7 to 11, after the round's last ``move``."""
        denom, steps = self.denominators(floored=True), len(self.sizes)
        sent = np.stack([self.compressed(u, self.segment) for u in self.u])
        self.signs, self.u = self.u >= 0, (self.u - sent) * self.live  # workers' error feedback; and line 11
        self.served = (self.served + sent.mean(0)) * self.live
        result = self.compressed(self.served, self.served_segment)  # line 8
        self.bits, self.served = self.served >= 0, (self.served - result) * self.live  # servers' error feedback
        self.m = np.stack([result / steps] * self.workers)  # line 9
        update = result
        if self.options["precondition"]:
            self.m = self.m * denom
        else:
            update = result / denom
        x = self.kept * self.x_common - np.mean(self.sizes) * update * self.live  # line 10
        self.x = np.stack([x] * self.workers)
        self.sizes, self.of_bits = [], True

    def compressed(self, c: np.ndarray, segment: np.ndarray) -> np.ndarray:
        count = np.maximum(np.bincount(segment, self.live), 1)
        l1 = np.bincount(segment, np.abs(c) * self.live) / count
        l2 = np.sqrt(np.bincount(segment, c * c * self.live) / count)
        norm = self.options.get("scale_norm", "contractive")
        scale = {"l1": l1, "l2": l2, "contractive": np.minimum(l2, 1.9 * l1)}[norm]
        return np.where(c >= 0, 1.0, -1.0) * scale[segment] * self.live
