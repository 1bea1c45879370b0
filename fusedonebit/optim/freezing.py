"""Decides when the variance is frozen, and what becomes of coordinates that never had a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import ModelGroup, ShardGroup
from ..core.header import AMOUNT, COUNT, FLAG, INT, list_of
from ..core.telemetry import HostMirror
from ..triton_kernels import Coef, exponents, live_variance, rules
from ..triton_kernels.nouns import Places

STABLE_RATIO = 0.96
"""1-bit Adam's threshold for |v_t|_1 / |v_{t-D}|_1."""

DECISION_DELAY = 8
"""Steps between the decision on the device and the freeze; the host learns of it in between."""


LARGEST_MULTIPLIER = 1000.0
"""Of 1/denom, as a multiple of its median, where momentum is preconditioned."""

UNSETTLED = (
    "the variance was not seen to settle by the deadline, {} updates, and is frozen as it is; if training suffers, "
    "warm up longer with freeze_step=Freeze(deadline=...)"
)


class AutoFreeze:
    """Decides on the device when v is stable: min(a,b)/max(a,b) >= 0.96 (1-bit Adam, Algorithm 1).

    a = |v_t|_1 and b = |v_{t-D}|_1, both bias-corrected, D = 1/(1 - beta2), looked at only once
    step t - D lies behind the learning-rate warm-up. (The bare ratio would fire at once while v
    still grows.) v is the same on all ranks, and so is the decision.

    Args:
        beta2: Sets D; the largest of all groups.
        lr_warmup_steps: Updates during which the learning rate rises.
        device: Where v lies.
    """

    fields: ClassVar = {"norms": list_of(AMOUNT), "seen": COUNT, "fired": FLAG, "pending": list_of(list_of(INT))}
    """What its ``state_dict`` has."""

    def __init__(self, beta2: float, lr_warmup_steps: int, device: torch.device) -> None:
        self.beta2 = beta2
        self.distance = max(1, round(1.0 / (1.0 - beta2)))
        self.lr_warmup_steps = lr_warmup_steps
        self._norms = torch.zeros(self.distance, dtype=torch.float64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)
        self._fired = torch.zeros((), dtype=torch.bool, device=device)
        self._mirror = HostMirror(device, depth=DECISION_DELAY)

    def observe(self, total: Tensor, step: Tensor) -> None:
        """Look at v after an update.

        Args:
            total: float64 [], the sum of v.
            step: int64 [], updates done; where the step was skipped nothing new is seen.
        """
        t = step.long()
        slot = (t % self.distance).reshape(1)
        corrected = total / (1 - self.beta2 ** t.double()).clamp(min=1e-300)
        before = self._norms.gather(0, slot)[0]
        low, high = torch.minimum(before, corrected), torch.maximum(before, corrected)
        stable = (low >= STABLE_RATIO * high) & (low > 0) & (t > self._seen)
        self._fired |= stable & (t - self.distance >= max(self.lr_warmup_steps, 1))
        self._norms.scatter_(0, slot, corrected.reshape(1))
        self._seen.copy_(t)

    def due(self) -> bool:
        """Return whether the freeze decided ``DECISION_DELAY`` steps ago is due now."""
        return any(self._mirror.push(self._fired.reshape(1).int()))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values to resume from; waits for the device."""
        pending = [[value] for value in self._mirror.flush_pending()]
        return {"norms": self._norms.tolist(), "seen": int(self._seen), "fired": bool(self._fired), "pending": pending}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` is of another beta2."""
        if len(state["norms"]) != self.distance:
            raise ValueError(
                f"the checkpoint's freeze rule looks {len(state['norms'])} steps back, this one {self.distance}; "
                "use the same betas"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``'s values; the distance must be the same."""
        self._norms.copy_(torch.tensor(state["norms"], dtype=torch.float64))
        self._seen.fill_(state["seen"])
        self._fired.fill_(state["fired"])
        self._mirror.refill([value for (value,) in state["pending"]])


class DeadCoordinates:
    """Finds v == 0 at the freeze, where m/denom would explode at the first gradient.

    Args:
        places: The flat index space.
        exp_avg_sq: float32 [P].
        live_count: int32 [B].
        shards: Where the rest of the tensors is.

    Attributes:
        mean: float32 [tensors], the mean of each tensor's v > 0 (0 where it has none).
        tensors: Indices of tensors with live elements but no v > 0.
        count: Live elements with v == 0 in the other tensors.
    """

    def __init__(self, places: Places, exp_avg_sq: Tensor, live_count: Tensor, shards: ShardGroup) -> None:
        n = len(places.sizes)
        sums, alive, live = (
            shards.sum(
                torch.zeros(n, dtype=torch.float64, device=exp_avg_sq.device).index_add_(0, places.block_tensor, values)
            )
            for values in (*live_variance(places, exp_avg_sq), live_count.double())
        )
        self.mean = (sums / alive.clamp(min=1.0)).float()
        self.tensors: list[int] = torch.nonzero((alive == 0) & (live > 0)).flatten().tolist()
        self.count = int((live - alive)[alive > 0].sum())


def quantile_floor(
    places: Places, exp_avg_sq: Tensor, coef: Tensor, eps_inside_sqrt: bool, model: ModelGroup
) -> Tensor:
    """Return what v must at least be so that no coordinate's 1/denom exceeds 1000 times the median's.

    The median is that of all live v > 0, to within 1/128 of an octave: counted, not sorted, so that
    it costs no memory and is the same on every rank.

    Args:
        places: The flat index space.
        exp_avg_sq: v, float32 [P].
        coef: float32 [tensors, columns of ``Coef``].
        eps_inside_sqrt: Which denom.
        model: Where the rest of v is.

    Returns:
        float32 [tensors].
    """
    counts = exponents(places, exp_avg_sq)
    below = model.sum(counts).cumsum(0)
    half = (below[-1:] + 1) // 2
    median = (torch.searchsorted(below, half).int() << 16).view(torch.float32).double()
    k = coef.double()
    root, eps = k[:, Coef.RSQRT_BIAS2], k[:, Coef.EPS]
    if eps_inside_sqrt:  # the inverse of rules.denominator, in float64
        least = (median * root**2 + eps) / LARGEST_MULTIPLIER**2 - eps
        return (least.clamp(min=0) / root**2).float()
    least = (median.sqrt() * root + eps) / LARGEST_MULTIPLIER - eps
    return (least.clamp(min=0) / root).square().float()


def denominator(v: Tensor, k: Tensor, eps_inside_sqrt: bool) -> Tensor:
    """Return denom of one tensor's v, from its row ``k`` of coefficients: float32 of the shape of ``v``."""
    denom: Tensor = rules.denominator(v.float()[None], k[None], eps_inside_sqrt)
    return denom.view(v.shape)


def warn_text(dead: DeadCoordinates, names: Sequence[str], keep: bool) -> str:
    """Return what to tell the user about dead tensors, whose v == 0 is kept or not."""
    listed = ", ".join(names[i] for i in dead.tensors[:5])
    more = f" and {len(dead.tensors) - 5} more" if len(dead.tensors) > 5 else ""
    fate = "will move by lr * m/eps" if keep else "are left out of the compression stage"
    return (
        f"{len(dead.tensors)} tensor(s) had no gradient during the whole warm-up and {fate}: "
        f"{listed}{more}. Warm up longer if they should train."
    )
