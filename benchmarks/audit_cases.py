"""What the byte audit compiles: the kernels, the types of their arguments, and their constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

BLOCK = 1024
WORDS = 512  # a block of the kernels that work on packed words, 32 elements each
_POINTERS = {
    "*i64": "pointers block_start segment_start layer_start rounding",
    "*fp32": (
        "compensated worker_scale exp_avg_scale coef exp_avg_sq out marker scale message_scales arrived_scales "
        "server_scale grad exp_avg x fresh last_scale largest layers unscale bound"
    ),
    "*fp64": "partials agreement count exp_avg_sq_sums norms squares",
    "*u8": "exp_avg_bits last_bits live tails bits arrived_bits",
    "*i32": "block_tensor segment slot live_row tail_row skip hold started message_flags",
}
TYPES = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
TYPES |= dict.fromkeys(("factor", "most", "per_worker"), "fp32")
PACKED = ("merge_signs", "pick_owned", "place_owned")
_WORD_TYPES = dict.fromkeys(("bits", "arrived_bits", "owners", "picked", "gathered"), "*u32")
_WORD_TYPES |= dict.fromkeys(("words", "arrived_words"), "*i32") | {"threshold": "i64", "thresholds": "*i64"}
_LOCAL_TYPES = dict.fromkeys(("params", "grads"), "*i64") | dict.fromkeys(("scale", "limit", "factor"), "*fp32")
TYPES_OF = dict.fromkeys(PACKED, _WORD_TYPES)
TYPES_OF |= {"local_update": _LOCAL_TYPES | {"flags": "*i32"}, "add_values": {"params": "*i64", "values": "*fp32"}}
TYPES_OF |= {"local_step": dict.fromkeys(("params", "grads"), "*i64") | {"flags": "*i32"}}
"""Where a kernel's argument has another type than its namesakes."""
FP32 = {"DTYPE": 0, "ALIGNED": True, "BLOCK": BLOCK}
GRADS = {"GRADS": 4, "BLOCK_SIZE": BLOCK}
ADAM = FP32 | {"EPS_INSIDE": False}
COMPRESS = ADAM | {"VARIANCE": 0, "PRECONDITION": False, "TERNARY": False}
FINISH = {"NORM": 2, "TERNARY": False, "LANES": 2048, "SHORT": 0}
SHORT = {"LANES": 128, "SHORT": 32}
REDUCE = {"TERNARY": False, "KEEPS": True, "BLOCK": BLOCK}
NEAREST = {"ROUNDING": False}
APPLY = ADAM | NEAREST | {"VARIANCE": 0, "PRECONDITIONED": False, "TERNARY": False}
RATIO = ADAM | {"VARIANCE": 0, "PRECONDITIONED": False, "TERNARY": False, "DEEPSPEED": False, "BLEND": False}
FROZEN_BF16 = {"VARIANCE": 1}
LAYERS = {"DEEPSPEED": False, "LANES": 1024}
LOCAL = FP32 | {"GRAD_DTYPE": 0, "GRAD_ALIGNED": True, "MOMENTUM": True, "ADAM": False, "DECAYS": False, "MOVES": False}
OWN_STEP = ADAM | {"GRAD_DTYPE": 0, "GRAD_ALIGNED": True, "PRECONDITION": True, "MOVES": True, "LAST": False}
OWN_STEP |= {"LEAKS": False}
ONLY_MOMENTUM = {"MOVES": False, "LAST": True}
REBUILD = {"EPS_INSIDE": False, "PRECONDITION": True, "BLOCK": BLOCK}
BF16 = {"DTYPE": 1, "GRAD_DTYPE": 1}
MIXED = {"DTYPE": 3, "GRAD_DTYPE": 3}
UNALIGNED = {"ALIGNED": False, "GRAD_ALIGNED": False}


Loops = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One kernel with its constants.

    Attributes:
        loops: How often a loop in it runs per block; of each loop, in their order, where they differ.
        share: Elements of the line that belong to an element of a block: W where a kernel works on all chunks at once.
        halves: Indices that are cut to 32 bits on purpose, as the words that a hash makes random bits of.
    """

    kernel: str
    constants: dict[str, Any]
    loops: Loops = 1
    num_warps: int = 4
    share: int = 1
    halves: int = 0
    bfloat16: str = ""

    @property
    def packed(self) -> bool:
        """Whether a block is one of packed words. Those kernels mask all that they read and write."""
        return self.kernel in PACKED

    @property
    def elements(self) -> int:
        """Of the line, for one block."""
        return self.share * (32 * WORDS if self.packed else BLOCK)

    def typed(self, argument: str, declared: str) -> str:
        """As Triton's signatures have it."""
        if argument in self.constants:
            return "constexpr"
        return "*bf16" if argument in self.bfloat16 else declared

    def type_of(self, argument: str) -> str:
        """As Triton's signatures have it."""
        if argument in self.constants:
            return "constexpr"
        if argument == "exp_avg_sq" and self.constants.get("VARIANCE") == FROZEN_BF16["VARIANCE"]:
            return "*bf16"
        return TYPES_OF.get(self.kernel, {}).get(argument) or TYPES.get(argument, "i32")


CASES = {
    "pack": Case("pack", {"BLOCK": BLOCK}),
    "unpack": Case("unpack", {"BLOCK": BLOCK}),
    "flatten": Case("flatten", FP32 | {"SCALED": False}),
    "gradient_squares": Case("gradient_squares", FP32),
    "gradient_squares, bf16": Case("gradient_squares", FP32 | {"DTYPE": 1}),
    "momentum_compress": Case("momentum_compress", COMPRESS),
    "momentum_compress, bf16": Case("momentum_compress", COMPRESS | {"DTYPE": 1}),
    "momentum_compress, preconditioned": Case("momentum_compress", COMPRESS | {"PRECONDITION": True}),
    "momentum_compress, preconditioned, bf16 variance": Case(
        "momentum_compress", COMPRESS | FROZEN_BF16 | {"PRECONDITION": True}
    ),
    "momentum_compress, ternary": Case("momentum_compress", COMPRESS | {"TERNARY": True}),
    "server_reduce, W=2": Case("server_reduce", REDUCE, loops=(0, 2)),
    "server_reduce, W=8": Case("server_reduce", REDUCE, loops=(1, 0)),
    "server_reduce, W=64": Case("server_reduce", REDUCE, loops=(8, 0)),
    "server_reduce, W=2, majority": Case("server_reduce", REDUCE | {"KEEPS": False}, loops=(0, 2)),
    "server_reduce, W=8, majority": Case("server_reduce", REDUCE | {"KEEPS": False}, loops=(1, 0)),
    "server_reduce, W=2, ternary": Case("server_reduce", REDUCE | {"TERNARY": True}, loops=(0, 2)),
    "apply_momentum": Case("apply_momentum", APPLY),
    "apply_momentum, bf16": Case("apply_momentum", APPLY | {"DTYPE": 1}),
    "apply_momentum, preconditioned": Case("apply_momentum", APPLY | {"PRECONDITIONED": True}),
    "apply_momentum, bf16 variance": Case("apply_momentum", APPLY | FROZEN_BF16),
    "apply_momentum, ternary": Case("apply_momentum", APPLY | {"TERNARY": True}),
    "adam_update": Case("adam_update", FP32 | NEAREST | {"SUMS": False}),
    "finish": Case("finish", FINISH | {"NORM": 1, "LANES": 8192}, loops=(1, 0, 1, 1, 0), num_warps=32),
    "lamb_update": Case("lamb_update", ADAM | {"SUMS": False}),
    "lamb_coefficient": Case("lamb_coefficient", LAYERS),
    "lamb_move": Case("lamb_move", ADAM | NEAREST),
    "lamb_ratio": Case("lamb_ratio", RATIO),
    "lamb_ratio, DeepSpeed's": Case("lamb_ratio", RATIO | {"DEEPSPEED": True, "BLEND": True}),
    "lamb_ratio, preconditioned": Case("lamb_ratio", RATIO | {"PRECONDITIONED": True}),
    "lamb_ratio, preconditioned, bf16 variance": Case("lamb_ratio", RATIO | FROZEN_BF16 | {"PRECONDITIONED": True}),
    "lamb_ratio, ternary": Case("lamb_ratio", RATIO | {"TERNARY": True}),
    "lamb_rescale": Case("lamb_rescale", LAYERS | {"BLEND": False}),
    "local_update": Case("local_update", LOCAL),
    "local_update, bf16": Case("local_update", LOCAL | BF16),
    "local_update, Adam": Case("local_update", LOCAL | {"ADAM": True}),
    "local_update, Adam, decays": Case("local_update", LOCAL | {"ADAM": True, "DECAYS": True}),
    "local_update, Adam, bf16": Case("local_update", LOCAL | BF16 | {"ADAM": True}),
    "merge_signs": Case("merge_signs", {"BLOCK": WORDS}),
    "pick_owned, W=2": Case("pick_owned", {"BLOCK": WORDS}, loops=2, share=2),
    "pick_owned, W=8": Case("pick_owned", {"BLOCK": WORDS}, loops=8, share=8),
    "place_owned, W=2": Case("place_owned", {"BLOCK": WORDS}, loops=2),
    "place_owned, W=8": Case("place_owned", {"BLOCK": WORDS}, loops=8),
    "add_values": Case("add_values", FP32 | NEAREST | {"REPLACES": False}),
    "add_values, replaces": Case("add_values", FP32 | NEAREST | {"REPLACES": True}),
    "local_step": Case("local_step", OWN_STEP | {"PRECONDITION": False}),
    "local_step, preconditioned": Case("local_step", OWN_STEP),
    "local_step, preconditioned, last": Case("local_step", OWN_STEP | {"LAST": True}),
    "local_step, preconditioned, bf16": Case("local_step", OWN_STEP | BF16),
    "rebuild_momentum": Case("rebuild_momentum", REBUILD | {"PRECONDITION": False}),
    "rebuild_momentum, preconditioned": Case("rebuild_momentum", REBUILD),
    "lion_compress": Case("lion_compress", GRADS, halves=2),
    "lion_compress, bf16": Case("lion_compress", GRADS | {"GRADS": 5}, halves=2),
}
VARIANTS = {
    "finish, layers": Case("finish", FINISH, num_warps=8),
    "finish, layers, ternary": Case("finish", FINISH | {"TERNARY": True}, num_warps=8),
    "finish, blocks": Case("finish", FINISH | SHORT),
    "finish, blocks, ternary": Case("finish", FINISH | SHORT | {"TERNARY": True}),
    "server_reduce, W=64, ternary": Case("server_reduce", REDUCE | {"TERNARY": True}, loops=(8, 0)),
    "flatten, mixed, scaled": Case("flatten", FP32 | {"DTYPE": 3, "SCALED": True}),
    "gradient_squares, mixed": Case("gradient_squares", FP32 | {"DTYPE": 3, "ALIGNED": False}),
    "momentum_compress, fp16": Case("momentum_compress", COMPRESS | {"DTYPE": 2}),
    "momentum_compress, mixed": Case("momentum_compress", COMPRESS | {"DTYPE": 3}),
    "momentum_compress, unaligned": Case("momentum_compress", COMPRESS | {"ALIGNED": False}),
    "momentum_compress, small blocks": Case("momentum_compress", COMPRESS | {"BLOCK": 128}),
    "apply_momentum, mixed": Case("apply_momentum", APPLY | {"DTYPE": 3}),
    "apply_momentum, unaligned": Case("apply_momentum", APPLY | {"ALIGNED": False}),
    "apply_momentum, eps inside": Case("apply_momentum", APPLY | {"EPS_INSIDE": True}),
    "adam_update, sums": Case("adam_update", FP32 | NEAREST | {"SUMS": True}),
    "lamb_update, bf16": Case("lamb_update", ADAM | {"SUMS": False, "DTYPE": 1}),
    "lamb_update, mixed, sums": Case("lamb_update", ADAM | {"SUMS": True, "DTYPE": 3, "EPS_INSIDE": True}),
    "lamb_coefficient, DeepSpeed's": Case("lamb_coefficient", LAYERS | {"DEEPSPEED": True}),
    "lamb_move, mixed": Case("lamb_move", ADAM | NEAREST | {"DTYPE": 3, "EPS_INSIDE": True}),
    "apply_momentum, stochastic rounding": Case("apply_momentum", APPLY | {"DTYPE": 1, "ROUNDING": True}),
    "adam_update, mixed, stochastic rounding": Case("adam_update", FP32 | {"SUMS": True, "DTYPE": 3, "ROUNDING": True}),
    "lamb_move, stochastic rounding": Case("lamb_move", ADAM | {"DTYPE": 1, "ROUNDING": True}),
    "lamb_ratio, mixed": Case("lamb_ratio", RATIO | {"DEEPSPEED": True, "BLEND": True, "DTYPE": 3}),
    "lamb_rescale, DeepSpeed's": Case("lamb_rescale", LAYERS | {"DEEPSPEED": True, "BLEND": True}),
    "local_update, no momentum": Case("local_update", LOCAL | {"MOMENTUM": False}),
    "local_update, decays": Case("local_update", LOCAL | {"DECAYS": True}),
    "local_update, moves": Case("local_update", LOCAL | {"MOVES": True}),
    "local_update, mixed": Case("local_update", LOCAL | MIXED | {"DECAYS": True, "MOVES": True}),
    "local_update, Adam, moves": Case("local_update", LOCAL | {"ADAM": True, "DECAYS": True, "MOVES": True}),
    "local_update, Adam, mixed": Case("local_update", LOCAL | MIXED | {"ADAM": True, "DECAYS": True, "MOVES": True}),
    "local_update, Adam, unaligned": Case("local_update", LOCAL | UNALIGNED | {"ADAM": True, "DECAYS": True}),
    "local_update, small blocks": Case("local_update", LOCAL | {"BLOCK": 128}),
    "merge_signs, short rows": Case("merge_signs", {"BLOCK": WORDS, "programs": 1}),
    "pick_owned, W=1": Case("pick_owned", {"BLOCK": WORDS, "world_size": 1}),
    "place_owned, W=1": Case("place_owned", {"BLOCK": WORDS, "world_size": 1}),
    "add_values, bf16": Case("add_values", FP32 | {"REPLACES": False, "DTYPE": 1, "ROUNDING": True}),
    "add_values, mixed": Case("add_values", FP32 | NEAREST | {"REPLACES": True, "DTYPE": 3, "ALIGNED": False}),
    "local_step, DeepSpeed's, last": Case(
        "local_step", OWN_STEP | {"PRECONDITION": False, "LEAKS": True, "LAST": True}
    ),
    "local_step, only momentum": Case("local_step", OWN_STEP | ONLY_MOMENTUM),
    "local_step, only momentum, plain": Case("local_step", OWN_STEP | ONLY_MOMENTUM | {"PRECONDITION": False}),
    "local_step, mixed": Case("local_step", OWN_STEP | MIXED | UNALIGNED | {"EPS_INSIDE": True, "LAST": True}),
    "local_step, small blocks": Case("local_step", OWN_STEP | {"BLOCK": 128}),
    "rebuild_momentum, eps inside": Case("rebuild_momentum", REBUILD | {"EPS_INSIDE": True}),
    "rebuild_momentum, small blocks": Case("rebuild_momentum", REBUILD | {"BLOCK": 128}),
    "lion_compress, mixed": Case("lion_compress", GRADS | {"GRADS": 3}),
    "lion_compress, small blocks": Case("lion_compress", GRADS | {"BLOCK_SIZE": 128}),
}
"""What else runs: must compile without spills; nothing else is limited."""
PER_LAYER = ("finish", "lamb_coefficient", "lamb_rescale")
"""Kernels that scan what blocks left, one block to a lane."""
PRECONDITIONED_STEP = ("momentum_compress, preconditioned", "finish", "apply_momentum, preconditioned")
HALF_STEP = ("momentum_compress, preconditioned, bf16 variance", *PRECONDITIONED_STEP[1:])
PLAIN_STEP = ("momentum_compress", "finish", "apply_momentum")


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
        """Bytes per parameter and step: the server's are 8.2 at most."""
        return self.limit + 8.2 / world_size / self.steps * bool(self.served)


LAST_STEP = "local_step, preconditioned, last"


def zero_one_round(steps: int) -> Step:
    """A round of 0/1 Adam, two steps or more: the last one synchronises, those before are each rank's own.

    The momentum is made of the last round's bits, the parameters are kept, and restored before the move.
    """
    before = ("rebuild_momentum, preconditioned", "flatten", *["local_step, preconditioned"] * (steps - 2), LAST_STEP)
    return Step((*before, *PRECONDITIONED_STEP, "add_values, replaces"), 32.1 + 12.8 / steps, steps=steps)


STEPS = {
    "1-bit Adam, preconditioned": Step(PRECONDITIONED_STEP, 24.9),
    "1-bit LAMB, preconditioned": Step((*PRECONDITIONED_STEP, "lamb_ratio, preconditioned", "lamb_rescale"), 37.1),
    "1-bit LAMB, frozen, preconditioned": Step(PRECONDITIONED_STEP, 24.9),
    "1-bit Adam, preconditioned, bf16 variance": Step(HALF_STEP, 22.9),
    "1-bit LAMB, preconditioned, bf16 variance": Step(
        (*HALF_STEP, "lamb_ratio, preconditioned, bf16 variance", "lamb_rescale"),
        33.1,
    ),
    "1-bit Adam, plain": Step(PLAIN_STEP, 24.9),
    "1-bit LAMB, plain": Step((*PLAIN_STEP, "lamb_ratio", "lamb_rescale"), 37.1),
    "1-bit LAMB, frozen, plain": Step(PLAIN_STEP, 24.9),
    "ZeroOneAdam, local step": Step(("local_step, preconditioned",), 32.1, served=()),
    "ZeroOneAdam, synchronising step after a round of one": Step(PRECONDITIONED_STEP, 24.9),
    **{f"ZeroOneAdam, mean over a round of {steps}": zero_one_round(steps) for steps in (2, 4, 16)},
    "OneBitLion": Step(("lion_compress", "apply_momentum, preconditioned"), 20.6, served=("server_reduce",)),
}
"""A compression-stage step of each optimizer. "preconditioned": ``precondition=True``; "plain": without."""


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
    names = (ROUNDS[optimizer], "apply_momentum, preconditioned")  # signs times a scale, by no denominator
    merged = bytes_of["merge_signs"] * (world_size - 1) / world_size
    return sum(bytes_of[name] for name in names) + merged
