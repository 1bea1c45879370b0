"""Which of the audited kernels each optimizer's step launches, and the bytes that they may move in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fusedonebit.optim.own_variance import TOLD_EVERY

PRECONDITIONED_STEP = ("momentum_compress, preconditioned", "finish", "receive", "apply_momentum, preconditioned")
GUARDED_STEP = ("momentum_compress, preconditioned", "finish", "receive, guarded", "apply_momentum, preconditioned")
ALONE_STEP = ("momentum_compress, preconditioned, in place", "finish_alone", "apply_momentum, preconditioned")
HALF_ALONE_STEP = ("momentum_compress, preconditioned, bf16 variance, in place", *ALONE_STEP[1:])
LIVING_STEP = ("momentum_compress, preconditioned, living", *GUARDED_STEP[1:])
LIVING_LAMB_STEP = (*LIVING_STEP[:-1], "lamb_follow", "apply_momentum, preconditioned, tells squares")
HALF_STEP = ("momentum_compress, preconditioned, bf16 variance", *GUARDED_STEP[1:])
NARROW_STEP = ("momentum_compress, state in bf16", *GUARDED_STEP[1:])
NARROW_LIVING_STEP = ("momentum_compress, state in bf16, living", *GUARDED_STEP[1:])
_CODED_MOVE = (*GUARDED_STEP[1:-1], "apply_momentum, preconditioned, bf16, stochastic rounding")
CODED_STEP = ("momentum_compress, bf16, state in codes", *_CODED_MOVE)
CORRECTED_STEP = (*CODED_STEP[:-1], "apply_momentum, preconditioned, bf16, 8-bit corrections")
CODED_LIVING_STEP = ("momentum_compress, bf16, state in codes, living", *_CODED_MOVE)
PLAIN_STEP = ("momentum_compress", "finish", "receive, guarded", "apply_momentum")


class Step(NamedTuple):
    """What one step of an optimizer launches.

    Attributes:
        kernels: Of a worker, on all parameters.
        limit: Of their bytes per parameter, those of the server on very many ranks included.
        served: Kernels of the server, on 1/W of the parameters; their name may want the number of ranks.
        steps: Steps that all of this is for.
    """

    kernels: tuple[str, ...]
    limit: float
    served: tuple[str, ...] = ("server_reduce", "finish")
    steps: int = 1

    def limit_of(self, world_size: int) -> float:
        """Bytes per parameter and step: a server's of a mean of bits are 8.2 at most, levels 4.7, votes 0.2."""
        levels = sum(name.startswith("requantise") for name in self.served)
        means = sum(name.startswith("server_reduce") and "majority" not in name for name in self.served)
        votes = sum("majority" in name for name in self.served)
        return self.limit + (8.2 * means + 4.7 * levels + 0.2 * votes) / world_size / self.steps


FIRST_STEP, LAST_STEP = "local_step, preconditioned, first", "local_step, preconditioned, last"


def zero_one_round(steps: int) -> Step:
    """A round of 0/1 Adam, two steps or more: the last one synchronises, those before are each rank's own.

    The momentum is made of the last round's bits, the parameters are kept, and restored before the move.
    """
    own: tuple[str, ...] = (f"{FIRST_STEP} and last",)
    if steps > 2:
        own = (FIRST_STEP, *["local_step, preconditioned"] * (steps - 3), LAST_STEP)
    before = ("rebuild_momentum, preconditioned", *own)
    return Step((*before, *PRECONDITIONED_STEP, "add_values, replaces"), 32.1 + 8.8 / steps, steps=steps)


OWN_ROUND = {1: 51.8, 2: 51.5, 4: 45.3}
"""Limits of bytes in rounds of so many steps."""


def own_round(steps: int) -> Step:
    """The same where workers have variances of their own: all steps are, and what they add up to is compressed.

    In so many rounds as last four steps; in one of them they tell each other of their gradients.
    """
    before = () if steps == 1 else ("local_step, follows, first", *["local_step, follows"] * (steps - 2))
    restores = () if steps == 1 else ("add_values, replaces",)
    synchronises = ("momentum_compress", "finish", "receive", *restores, "apply_momentum, preconditioned")
    rounds = max(1, TOLD_EVERY // steps)
    own = (*before, "local_step, follows, last", *synchronises)
    served = ("server_reduce", "finish") * rounds
    return Step((*own * rounds, "tell_level"), OWN_ROUND[steps], served, steps=steps * rounds)


def with_renewal(
    renew: str, step: tuple[str, ...], limit: float, serve: str = "server_reduce", renew_served: str = "renew, server"
) -> Step:
    """50 steps with a living variance, in one of which squares are shared, and v renewed."""
    tell = "tell_squares, bf16, squares in codes" if "codes" in renew else "tell_squares, bf16 squares"
    served = (*(serve, "finish") * 50, "average_squares", renew_served)
    return Step((*step * 50, tell, renew), limit, served, steps=50)


STEPS = {
    "1-bit Adam, preconditioned": Step(GUARDED_STEP, 24.7),
    "1-bit LAMB, preconditioned": Step((*GUARDED_STEP, "lamb_ratio, preconditioned", "lamb_rescale"), 37.15),
    "1-bit LAMB, frozen, preconditioned": Step(GUARDED_STEP, 24.7),
    "1-bit Adam, preconditioned, bf16 variance": Step(HALF_STEP, 22.7),
    "1-bit LAMB, preconditioned, bf16 variance": Step(
        (*HALF_STEP, "lamb_ratio, preconditioned, bf16 variance", "lamb_rescale"),
        33.15,
    ),
    "1-bit Adam, alone, preconditioned": Step(ALONE_STEP, 24.6, served=()),
    "1-bit LAMB, alone, preconditioned": Step(
        (*ALONE_STEP, "lamb_ratio, preconditioned", "lamb_rescale"), 37.0, served=()
    ),
    "1-bit Adam, alone, preconditioned, bf16 variance": Step(HALF_ALONE_STEP, 22.6, served=()),
    "1-bit Adam, living": Step(LIVING_STEP, 25.75),
    "1-bit Adam, living, mean over 50 steps": with_renewal("renew", LIVING_STEP, 26.4),
    "1-bit Adam, state in bf16": Step(NARROW_STEP, 18.7, served=("server_reduce in bf16", "finish")),
    "1-bit Adam, state in bf16, living, mean over 50 steps": with_renewal(
        "renew, state in bf16", NARROW_LIVING_STEP, 23.4, "server_reduce in bf16", "renew, server, state in bf16"
    ),
    "1-bit Adam, bf16, state in codes": Step(CODED_STEP, 9.7, served=("server_reduce in codes", "finish")),
    "1-bit Adam, bf16, state in codes, 8-bit corrections": Step(
        CORRECTED_STEP, 11.7, served=("server_reduce in codes", "finish")
    ),
    "1-bit Adam, bf16, state in codes, living, mean over 50 steps": with_renewal(
        "renew, state in codes", CODED_LIVING_STEP, 12.0, "server_reduce in codes", "renew, server, state in codes"
    ),
    "1-bit LAMB, living": Step(LIVING_LAMB_STEP, 25.75),
    "1-bit LAMB, living, mean over 50 steps": with_renewal("renew", LIVING_LAMB_STEP, 26.4),
    "1-bit Adam, plain": Step(PLAIN_STEP, 24.7),
    "1-bit LAMB, plain": Step((*PLAIN_STEP, "lamb_ratio", "lamb_rescale"), 37.15),
    "1-bit LAMB, frozen, plain": Step(PLAIN_STEP, 24.7),
    "ZeroOneAdam, local step": Step(("local_step, preconditioned",), 32.1, served=()),
    "ZeroOneAdam, synchronising step after a round of one": Step(PRECONDITIONED_STEP, 24.7),
    **{f"ZeroOneAdam, mean over a round of {steps}": zero_one_round(steps) for steps in (2, 4, 16)},
    "ZeroOneAdam, own variances, local step": Step(("local_step, follows",), 36.1, served=()),
    **{f"ZeroOneAdam, own variances, mean over a round of {steps}": own_round(steps) for steps in OWN_ROUND},
    "OneBitLion": Step(
        ("lion_compress", "receive", "apply_momentum, preconditioned"), 20.52, served=("server_reduce, majority",)
    ),
}
"""A compression-stage step of each optimizer; "alone": of one rank. "preconditioned": ``precondition=True``; "plain":
without; "living": between two renewals of the variance, or with one.

Lion's ``finish``, which writes headers only, moves nothing per parameter, as don't counts and coefficients.
"""


_OF_BFLOAT16 = "1 warps, {}BITS=4, BLOCK_SIZE=256"
HOOKS = {
    "compress, 4 bits, gradients and residuals in bf16": Step(
        (
            f"quantise, {_OF_BFLOAT16.format('residual_numbers=*bf16, TENSORS=5, ')}",
            f"dequantise, {_OF_BFLOAT16.format('TENSORS=5, ')}",
        ),
        9.9,
        served=(f"requantise, {_OF_BFLOAT16.format('residual_numbers=*bf16, ')}",),
    )
}
"""An average of gradients, beside any optimizer's step; ``take_back`` moves nothing unless a gradient is not finite."""


def step_bytes(bytes_of: Mapping[str, float], step: Step, world_size: int) -> float:
    """Bytes per parameter of a whole compression-stage step of one rank, from those per element of each kernel."""
    served = [bytes_of.get(name) or bytes_of[f"{name}, W={world_size}"] for name in step.served]
    return (sum(bytes_of[name] for name in step.kernels) + sum(served) / world_size) / step.steps


MERGE_LIMIT = 0.4
"""Of Marsit's operator, per element and hop, besides the read of the local value: its own packed bit."""
ROUNDS = {"MarsitSGD": "local_update", "MarsitAdam": "local_update, Adam, decays"}
"""What makes the update, with each optimizer's defaults."""
PEERS = "torch's fused SGD with momentum moves 20, fused AdamW 28"


def round_bytes(bytes_of: Mapping[str, float], optimizer: str, world_size: int) -> float:
    """Bytes per parameter of a whole 1-bit round of a ring: each rank merges all segments but one."""
    # Signs times a scale, by no denominator.
    names = (ROUNDS[optimizer], "close_round", "apply_momentum, preconditioned")
    merged = bytes_of["merge_signs"] * (world_size - 1) / world_size
    return sum(bytes_of[name] for name in names) + merged
