"""What the byte audit compiles: the ops' kernels, each by what differs from the usual call; types are the ops' own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fusedonebit.triton_kernels.op import OPS

BLOCK = 1024
WORDS = 512  # a block of the kernels that work on packed words, 32 elements each
PACKED = ("merge_signs", "pick_owned", "place_owned")
CONSTANTS = dict.fromkeys(("PARAMS", "GRADS", "TENSORS"), 4) | {
    "BLOCK_SIZE": BLOCK,
    "WORDS": WORDS,
    "AT_ONCE": 1024,
    "WIDTH": 64,
}
"""What constants are where a case does not say, False otherwise: tensors are float32 and aligned."""
BF16 = {"PARAMS": 5, "GRADS": 5}


def of(noun: str, kind: str, *fields: str) -> dict[str, Any]:
    """Return the types of a noun's fields: the same of all."""
    return {f"{noun}_{field}": kind for field in fields}


MIXED = {"PARAMS": 7, "GRADS": 7}
UNALIGNED = {"PARAMS": 0, "GRADS": 0}
V = {"exp_avg_sq": "*fp32"}
VARIANCE = {"exp_avg_sq_numbers": "*fp32"}
FROZEN_BF16 = {"exp_avg_sq_numbers": "*bf16"}
FROZEN_IN_CODES = of("exp_avg_sq", "*u8", "numbers", "exponents")
EPS_INSIDE = {"EXP_AVG_SQ_EPS_INSIDE_SQRT": True}
FOLLOWED = {"worker_sq": "*fp32"}
HALF_FOLLOWED = {"worker_sq": "*bf16", "compensated_drawn": "*i64"}
IN_BF16 = {"compensated_numbers": "*bf16", "compensated_drawn": "*i64"}
IN_CODES = of("compensated", "*u8", "numbers", "exponents") | {"compensated_drawn": "*i64"}
NARROW = IN_BF16 | FROZEN_BF16
CODED = IN_CODES | FROZEN_IN_CODES
SIDE = dict.fromkeys(("compensated_numbers", "scale", "settled"), "*fp32") | VARIANCE
CARRIES = SIDE | {"exp_avg_bits": "*u8", "exp_avg_scale": "*fp32", "WRITES": True}
CODED_SIDE = of("compensated", "*u8", "numbers", "exponents") | FROZEN_IN_CODES
HALF_SIDE = {"compensated_numbers": "*bf16"} | FROZEN_BF16
STOCHASTIC = {"rounding": "*i64"}
FOUND = dict.fromkeys(("found", "found_before"), "*i32")
MOMENTS_IN_BF16 = of("moments", "*bf16", "exp_avg", "exp_avg_sq")
MOMENTS_IN_CODES = of("moments", "*u8", "exp_avg", "exp_avg_sq", "exponents")
HALF_MOMENTS = MOMENTS_IN_BF16 | {"moments_drawn": "*i64"}
CODED_MOMENTS = MOMENTS_IN_CODES | {"moments_drawn": "*i64"}
CORRECTED = BF16 | {"correction": "*i16"}
CORRECTED_BY_8_BITS = BF16 | STOCHASTIC | {"correction": "*i8"}
MADE = {"ROOM": 32, "coefficients_group_of": "*i32"}
MADE |= dict.fromkeys(("coefficients_groups", "coefficients_steps"), "*fp64")
CLOCK = MADE | {"entered": "*fp64"}
TABLE = {"coefficients_table": "*fp32"}
RENEWS = dict.fromkeys(("coefficients_groups", "coefficients_steps", "coefficients_mean_sq"), "*fp64") | TABLE
RENEWS |= {"coefficients_group_of": "*i32"}
SUMS = {"digest": "*i64"}
TAKEN = {"flags": "*i32", "count_updates": "*i64"}
COUNTS = {"count_absent": "*u8", "count_updates": "*i64", "count_number": "*i32", "count_replays": "*i64"}
CAPTURED = TAKEN | COUNTS | {"coefficients_lr": "*fp32", "unit": "*fp32"}
COUNTS |= {"steps": "*fp64"}
FLOORS = {"coefficients_mean_sq": "*fp64"}
FINISH = {"NORM": 2}
LIMIT = {"limit_block_tensor": "*i32", "limit_weight": "*fp32", "limit_largest": "*fp64", "limit_norm": "*fp64"}
ALONE = FINISH | RENEWS | LIMIT
COUNTER = {"header_counter": "*i32", "HEADER_COUNTS": True}
MAJORITY = {"compensated_numbers": None, "words": "*i32"}
GUARD = LIMIT | {"limit_coef": "*fp32", "squares": "*fp64"}
TELLS = {"told": "*fp32"}
OF_A_SCALED_LOSS = dict.fromkeys(("loss_scale", "found_inf", "earlier"), "*fp32")
CLIPS = {"CLIPS": True, "WEIGHS": 1, "digest": "*i64"}
COUNTED = {"digest_updates": "*i64"}
WEIGHED = {"weights": "*fp32"}
BLENDED = {"OF_DENOMINATORS": True, "RANGE_FIRST": True, "norms": "*fp64", "ratios_norms": "*fp64"}
LOCAL = {"exp_avg": "*fp32"}
ADAM = LOCAL | V
DECAYS = {"STEP_DECAYS": True}
MOVES = {"STEP_MOVES": True}
BEGINS = MOVES | {"step_anchor": "*fp32"}
OWN_STEP = {"STEP_PRECONDITION": True, "STEP_MOVES": True}
FOLLOWS = OWN_STEP | {"STEP_FOLLOWS": True}
FIRST = {"anchor": "*fp32"}
OF_A_ROUND = {"summed": "*fp32", "awaited": "*fp64"}
MOVED = {"coefficients_moved": "*fp32"}
ONLY_MOMENTUM = {"STEP_MOVES": False, "STEP_LAST": True}

Loops = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One op's kernel.

    Attributes:
        changes: Its constants where they are not ``CONSTANTS``, and the types of optional tensors that are given.
        loops: How often a loop in it runs per block; of each loop, in their order, where they differ.
        share: Elements that belong to an element of a block: W where a kernel works on all chunks at once.
        cached: Bytes that every block reads and that stay in the cache: the headers of all ranks, 16 at a time.
        halves: Numbers that are cut to 32 bits on purpose: words that a hash makes random bits of, a digest.
    """

    kernel: str
    changes: dict[str, Any] = field(default_factory=dict)
    loops: Loops = 1
    num_warps: int = 4
    share: int = 1
    halves: int = 0
    cached: int = 0

    @property
    def packed(self) -> bool:
        """Whether a block is one of packed words. Those kernels mask all that they read and write."""
        return self.kernel in PACKED

    @property
    def elements(self) -> int:
        """Of the whole index space, for one block."""
        return self.share * (32 * WORDS if self.packed else BLOCK)

    def specialised(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Types of the kernel's arguments, as Triton's signatures have them, and the values of its constants."""
        op = OPS[self.kernel]
        types, constants = {}, {}
        for name, kind, *_ in op.parameters:
            optional = name in op.arguments and op.arguments[name].schema == "Tensor?"
            value = self.changes.get(name, CONSTANTS.get(name, False) if kind == "constexpr" else None)
            if isinstance(value, str):
                types[name] = value
            elif kind == "constexpr" or optional or name in self.changes:
                types[name], constants[name] = "constexpr", value
            else:
                types[name] = kind
        return types, constants


HEADERS = 16 * 24 + 20  # six words of each, and what of this rank's own must be equal

CASES = {
    "pack": Case("pack"),
    "unpack": Case("unpack"),
    "flatten": Case("flatten"),
    "gradient_squares": Case("gradient_squares", TELLS, loops=0),
    "gradient_squares, bf16": Case("gradient_squares", TELLS | {"TENSORS": 5}, loops=0),
    "scale_coefficients": Case("scale_coefficients", CLIPS),
    "momentum_compress": Case("momentum_compress"),
    "momentum_compress, bf16": Case("momentum_compress", BF16),
    "momentum_compress, preconditioned": Case("momentum_compress", VARIANCE),
    "momentum_compress, preconditioned, bf16 variance": Case("momentum_compress", FROZEN_BF16),
    "momentum_compress, preconditioned, in place": Case("momentum_compress", VARIANCE | {"IN_PLACE": True}),
    "momentum_compress, preconditioned, bf16 variance, in place": Case(
        "momentum_compress", FROZEN_BF16 | {"IN_PLACE": True}
    ),
    "momentum_compress, preconditioned, living": Case("momentum_compress", VARIANCE | FOLLOWED),
    "momentum_compress, preconditioned, bf16 variance, living": Case(
        "momentum_compress", FROZEN_BF16 | HALF_FOLLOWED, halves=2
    ),
    "momentum_compress, state in bf16": Case("momentum_compress", NARROW, halves=2),
    "momentum_compress, state in bf16, living": Case("momentum_compress", NARROW | HALF_FOLLOWED, halves=2),
    "momentum_compress, bf16, state in codes": Case("momentum_compress", BF16 | CODED, halves=2),
    "momentum_compress, bf16, state in codes, living": Case(
        "momentum_compress", BF16 | CODED | {"worker_sq": "*u8"}, halves=2
    ),
    "momentum_compress, ternary": Case("momentum_compress", {"TERNARY": True}),
    "server_reduce, W=2": Case("server_reduce", loops=(1, 0, 0, 2), halves=1, cached=HEADERS, num_warps=1),
    "server_reduce, W=8": Case("server_reduce", loops=(1, 0, 1, 0), halves=1, cached=HEADERS, num_warps=1),
    "server_reduce, W=64": Case("server_reduce", loops=(4, 0, 8, 0), halves=1, cached=4 * HEADERS, num_warps=1),
    **{
        f"server_reduce in {name}, W={n}": Case(
            "server_reduce", kept, loops=loops, halves=3, cached=cached, num_warps=1
        )
        for name, kept in (("bf16", IN_BF16), ("codes", IN_CODES))
        for n, loops, cached in (
            (2, (1, 0, 0, 2), HEADERS),
            (8, (1, 0, 1, 0), HEADERS),
            (64, (4, 0, 8, 0), 4 * HEADERS),
        )
    },
    "server_reduce, W=2, majority": Case(
        "server_reduce", MAJORITY, loops=(1, 0, 0, 2), halves=1, cached=HEADERS, num_warps=1
    ),
    "server_reduce, W=8, majority": Case(
        "server_reduce", MAJORITY, loops=(1, 0, 1, 0), halves=1, cached=HEADERS, num_warps=1
    ),
    "server_reduce, W=2, ternary": Case(
        "server_reduce", {"TERNARY": True}, loops=(1, 0, 0, 2), halves=1, cached=HEADERS
    ),
    "apply_momentum": Case("apply_momentum", VARIANCE | SUMS),
    "apply_momentum, bf16": Case("apply_momentum", VARIANCE | BF16 | SUMS),
    "apply_momentum, preconditioned": Case("apply_momentum", SUMS),
    "apply_momentum, preconditioned, tells squares": Case("apply_momentum", SUMS | {"x_squares": "*fp32"}),
    "apply_momentum, preconditioned, bf16, stochastic rounding": Case(
        "apply_momentum", BF16 | SUMS | STOCHASTIC, halves=2
    ),
    "apply_momentum, bf16 variance": Case("apply_momentum", FROZEN_BF16 | SUMS),
    "apply_momentum, ternary": Case("apply_momentum", VARIANCE | SUMS | {"TERNARY": True}),
    "adam_update": Case("adam_update"),
    "adam_update, alone": Case("adam_update", FOUND),
    "adam_update, alone, bf16": Case("adam_update", FOUND | BF16),
    "adam_update, alone, moments in bf16": Case("adam_update", FOUND | HALF_MOMENTS, halves=2),
    "adam_update, alone, moments in codes": Case("adam_update", FOUND | CODED_MOMENTS, halves=2),
    "adam_update, alone, bf16, moments in codes": Case(
        "adam_update", FOUND | BF16 | CODED_MOMENTS | STOCHASTIC, halves=2
    ),
    "adam_update, alone, bf16, moments in bf16": Case(
        "adam_update", FOUND | BF16 | HALF_MOMENTS | STOCHASTIC, halves=2
    ),
    "adam_update, alone, bf16, moments in codes, 8-bit corrections": Case(
        "adam_update", FOUND | CODED_MOMENTS | CORRECTED_BY_8_BITS, halves=2
    ),
    "adam_update, alone, bf16, moments in codes, 16-bit corrections": Case(
        "adam_update", FOUND | CODED_MOMENTS | CORRECTED, halves=2
    ),
    "apply_momentum, preconditioned, bf16, 8-bit corrections": Case(
        "apply_momentum", SUMS | CORRECTED_BY_8_BITS, halves=2
    ),
    "apply_momentum, preconditioned, bf16, 16-bit corrections": Case("apply_momentum", SUMS | CORRECTED),
    "finish": Case("finish", FINISH | {"NORM": 1}, loops=(0, 0, 1, 1, *[0] * 9), halves=1, num_warps=1),
    "finish_alone": Case("finish_alone", ALONE, loops=(0, 0, 1, 1, 0, 0, 1, *[0] * 4), num_warps=1),
    "receive": Case("receive", COUNTED, loops=(1, 1, 0, 0), share=128, cached=HEADERS, num_warps=1),
    "receive, guarded": Case(
        "receive", GUARD | COUNTED, loops=(1, 1, *[0] * 6), share=128, cached=HEADERS, num_warps=1
    ),
    "lamb_update": Case("lamb_update"),
    "lamb_update, alone, moments in bf16": Case("lamb_update", FOUND | HALF_MOMENTS, halves=2),
    "lamb_update, alone, bf16, moments in codes": Case("lamb_update", FOUND | BF16 | CODED_MOMENTS, halves=2),
    "lamb_move, moments in bf16": Case("lamb_move", MOMENTS_IN_BF16),
    "lamb_move, bf16, moments in codes": Case("lamb_move", BF16 | STOCHASTIC | MOMENTS_IN_CODES, halves=2),
    "lamb_coefficient": Case("lamb_coefficient"),
    "lamb_move": Case("lamb_move"),
    "lamb_ratio": Case("lamb_ratio"),
    "lamb_ratio, DeepSpeed's": Case("lamb_ratio", BLENDED),
    "lamb_ratio, preconditioned": Case("lamb_ratio", {"PRECONDITIONED": True}),
    "lamb_ratio, preconditioned, bf16 variance": Case("lamb_ratio", FROZEN_BF16 | {"PRECONDITIONED": True}),
    "lamb_ratio, ternary": Case("lamb_ratio", {"TERNARY": True}),
    "lamb_rescale": Case("lamb_rescale"),
    "lamb_follow": Case("lamb_follow"),
    "local_update": Case("local_update", LOCAL, halves=1),
    "local_update, bf16": Case("local_update", LOCAL | BF16, halves=1),
    "local_update, Adam": Case("local_update", ADAM, halves=1),
    "local_update, Adam, decays": Case("local_update", ADAM | DECAYS, halves=1),
    "local_update, Adam, bf16": Case("local_update", ADAM | BF16, halves=1),
    "merge_signs": Case("merge_signs"),
    "close_round": Case(
        "close_round", COUNTED | {"SIGNS": True}, loops=(1, 0, 1, 0), share=128, cached=HEADERS, num_warps=1
    ),
    "close_parts": Case("close_parts", GUARD, loops=(0, 1, *[0] * 4), num_warps=1),
    "pick_owned, W=2": Case("pick_owned", loops=2, share=2),
    "pick_owned, W=8": Case("pick_owned", loops=8, share=8),
    "place_owned, W=2": Case("place_owned", loops=2),
    "place_owned, W=8": Case("place_owned", loops=8),
    "add_values": Case("add_values"),
    "add_values, replaces": Case("add_values", {"REPLACES": True}),
    "local_step": Case("local_step", OWN_STEP | {"STEP_PRECONDITION": False}),
    "local_step, preconditioned": Case("local_step", OWN_STEP),
    "local_step, preconditioned, first": Case("local_step", OWN_STEP | FIRST),
    "local_step, preconditioned, last": Case("local_step", OWN_STEP | {"STEP_LAST": True}),
    "local_step, preconditioned, first and last": Case("local_step", OWN_STEP | FIRST | {"STEP_LAST": True}),
    "local_step, preconditioned, bf16": Case("local_step", OWN_STEP | BF16),
    "local_step, follows": Case("local_step", FOLLOWS),
    "local_step, follows, first": Case("local_step", FOLLOWS | FIRST),
    "local_step, follows, last": Case("local_step", FOLLOWS | {"STEP_LAST": True}),
    "local_step, follows, bf16": Case("local_step", FOLLOWS | BF16),
    "rebuild_momentum": Case("rebuild_momentum", TABLE),
    "rebuild_momentum, preconditioned": Case("rebuild_momentum", TABLE | OF_A_ROUND | V),
    "tell_squares": Case("tell_squares", halves=2),
    "tell_squares, bf16": Case("tell_squares", BF16, halves=2),
    "tell_squares, bf16, squares in codes": Case(
        "tell_squares", BF16 | of("worker_sq", "*u8", "numbers", "exponents"), halves=2
    ),
    "tell_squares, bf16 squares": Case("tell_squares", {"worker_sq_numbers": "*bf16"}, halves=2),
    "tell_level": Case("tell_level", halves=2),
    "tell_level, bf16": Case("tell_level", BF16, halves=2),
    **{f"average_squares, W={n}": Case("average_squares", loops=n, share=1) for n in (2, 8, 64)},
    "renew": Case("renew", CARRIES),
    "renew, bf16 variance": Case("renew", CARRIES | FROZEN_BF16),
    "renew, server": Case("renew", SIDE),
    "renew, state in codes": Case("renew", CARRIES | CODED_SIDE),
    "renew, server, state in codes": Case("renew", SIDE | CODED_SIDE),
    "renew, state in bf16": Case("renew", CARRIES | HALF_SIDE),
    "renew, server, state in bf16": Case("renew", SIDE | HALF_SIDE),
    "lion_compress": Case("lion_compress", WEIGHED, halves=2),
    "lion_compress, bf16": Case("lion_compress", WEIGHED | BF16, halves=2),
}
VARIANTS = {
    "advance": Case("advance", CLOCK),
    "advance, counts": Case("advance", CLOCK | TAKEN | {"RENEWS": True}),
    "advance, captured": Case("advance", CLOCK | CAPTURED),
    "advance, floors": Case("advance", CLOCK | TAKEN | FLOORS),
    "advance, adds up": Case("advance", CLOCK | TAKEN | FLOORS | MOVED),
    "advance, begins to add up": Case("advance", CLOCK | TAKEN | MOVED | {"BEGINS": True}),
    "advance, levels": Case("advance", MADE | TAKEN | MOVED | {"rho": "*fp32", "BEGINS": True}),
    "tell_squares, mixed, of a scaled loss": Case("tell_squares", MIXED | {"factor": "*fp32"}, halves=2),
    "tell_level, mixed, of a scaled loss": Case("tell_level", MIXED | {"factor": "*fp32"}, halves=2),
    "follow_level": Case("follow_level", {"absent": "*u8"}, loops=1),
    "renew_levels": Case("renew_levels", {"absent": "*u8"}, loops=(1, 1, 1)),
    "renew_levels, of whole tensors": Case("renew_levels", {"sums": "*fp64"}, loops=(1, 1, 1)),
    "renew, ternary": Case("renew", CARRIES | {"TERNARY": True}),
    "renew, undivided": Case("renew", VARIANCE | {"WRITES": True}),
    "finish, counts": Case("finish", FINISH | COUNTER, num_warps=1),
    "finish, renews": Case("finish", FINISH | RENEWS, num_warps=1),
    "finish, renews, rates on the device": Case("finish", FINISH | RENEWS | {"coefficients_lr": "*fp32"}, num_warps=1),
    "finish_alone, counts": Case("finish_alone", FINISH | COUNTER, num_warps=1),
    "finish_alone, ternary": Case("finish_alone", ALONE | COUNTER | {"TERNARY": True}, num_warps=1),
    "momentum_compress, ternary, in place": Case("momentum_compress", {"TERNARY": True, "IN_PLACE": True}),
    "finish, renews, of a round": Case("finish", FINISH | RENEWS | MOVED, num_warps=1),
    "finish_alone, of a round": Case("finish_alone", ALONE | MOVED, num_warps=1),
    "apply_momentum, counts": Case("apply_momentum", VARIANCE | COUNTS | SUMS),
    "finish, ternary": Case("finish", FINISH | {"TERNARY": True}, num_warps=1),
    "server_reduce, W=64, ternary": Case(
        "server_reduce", {"TERNARY": True}, loops=(4, 0, 8, 0), halves=1, cached=4 * HEADERS
    ),
    "server_reduce in bf16, W=64, ternary": Case(
        "server_reduce", IN_BF16 | {"TERNARY": True}, loops=(4, 0, 8, 0), halves=3, cached=4 * HEADERS, num_warps=8
    ),
    "server_reduce in codes, W=64, ternary": Case(
        "server_reduce", IN_CODES | {"TERNARY": True}, loops=(4, 0, 8, 0), halves=3, cached=4 * HEADERS, num_warps=8
    ),
    "flatten, mixed, scaled": Case("flatten", {"TENSORS": 7, "unscale": "*fp32"}),
    "gradient_squares, mixed": Case("gradient_squares", {"TENSORS": 3}),
    "gradient_squares, of a scaled loss": Case("gradient_squares", TELLS | OF_A_SCALED_LOSS, loops=0),
    "scale_coefficients, of a scaled loss": Case(
        "scale_coefficients", CLIPS | {"loss_scale": "*fp32", "EARLIER_TOO": True, "WEIGHS": 2}
    ),
    "momentum_compress, fp16": Case("momentum_compress", {"GRADS": 6}),
    "momentum_compress, mixed": Case("momentum_compress", MIXED),
    "momentum_compress, unaligned": Case("momentum_compress", UNALIGNED),
    "momentum_compress, small blocks": Case("momentum_compress", {"BLOCK_SIZE": 128}),
    "apply_momentum, alone": Case("apply_momentum"),
    "apply_momentum, mixed": Case("apply_momentum", VARIANCE | MIXED),
    "apply_momentum, unaligned": Case("apply_momentum", VARIANCE | UNALIGNED),
    "apply_momentum, eps inside": Case("apply_momentum", VARIANCE | EPS_INSIDE),
    "adam_update, sums": Case("adam_update", {"exp_avg_sq_sums": "*fp64"}),
    "adam_update, mixed, 8-bit corrections": Case("adam_update", FOUND | CODED_MOMENTS | CORRECTED_BY_8_BITS | MIXED),
    "adam_update, of a part, 8-bit corrections": Case(
        "adam_update", FOUND | CODED_MOMENTS | CORRECTED_BY_8_BITS | {"first": "*i32"}
    ),
    "adam_update, mixed, 16-bit corrections": Case("adam_update", CORRECTED | MIXED | {"exp_avg_sq_sums": "*fp64"}),
    "apply_momentum, mixed, 8-bit corrections": Case("apply_momentum", VARIANCE | CORRECTED_BY_8_BITS | MIXED),
    "apply_momentum, counts, 16-bit corrections": Case("apply_momentum", VARIANCE | COUNTS | SUMS | CORRECTED),
    "lamb_update, bf16": Case("lamb_update", BF16),
    "lamb_update, mixed, sums": Case("lamb_update", MIXED | {"exp_avg_sq_sums": "*fp64", "EPS_INSIDE_SQRT": True}),
    "lamb_coefficient, DeepSpeed's": Case("lamb_coefficient", {"SKIPS_ONES": True}),
    "lamb_move, mixed": Case("lamb_move", MIXED | {"EPS_INSIDE_SQRT": True}),
    "apply_momentum, stochastic rounding": Case("apply_momentum", VARIANCE | BF16 | STOCHASTIC),
    "adam_update, mixed, stochastic rounding": Case("adam_update", MIXED | STOCHASTIC | {"exp_avg_sq_sums": "*fp64"}),
    "lamb_move, stochastic rounding": Case("lamb_move", BF16 | STOCHASTIC),
    "lamb_ratio, mixed": Case("lamb_ratio", MIXED | BLENDED),
    "lamb_rescale, DeepSpeed's": Case("lamb_rescale", BLENDED),
    "local_update, no momentum": Case("local_update", {}),
    "local_update, decays": Case("local_update", LOCAL | DECAYS),
    "local_update, moves": Case("local_update", LOCAL | MOVES),
    "local_update, moves, first": Case("local_update", LOCAL | BEGINS),
    "local_update, mixed": Case("local_update", LOCAL | MIXED | DECAYS | MOVES),
    "local_update, Adam, moves": Case("local_update", ADAM | DECAYS | MOVES),
    "local_update, Adam, mixed": Case("local_update", ADAM | MIXED | DECAYS | MOVES),
    "local_update, Adam, mixed, first": Case("local_update", ADAM | MIXED | DECAYS | BEGINS),
    "local_update, Adam, unaligned": Case("local_update", ADAM | UNALIGNED | DECAYS),
    "local_update, small blocks": Case("local_update", LOCAL | {"BLOCK_SIZE": 128}),
    "close_parts, no guard": Case("close_parts", num_warps=1),
    "close_round, floats": Case("close_round", COUNTED | {"received_heads": "*u8"}, num_warps=1),
    "merge_signs, short rows": Case("merge_signs", {"parts": 1}),
    "pick_owned, W=1": Case("pick_owned", {"world_size": 1}),
    "place_owned, W=1": Case("place_owned", {"world_size": 1}),
    "add_values, bf16": Case("add_values", BF16 | STOCHASTIC),
    "add_values, mixed": Case("add_values", {"REPLACES": True, "PARAMS": 3}),
    "local_step, DeepSpeed's, last": Case(
        "local_step", OWN_STEP | {"STEP_PRECONDITION": False, "STEP_DECAY_IN_UPDATE": True, "STEP_LAST": True}
    ),
    "local_step, only momentum": Case("local_step", OWN_STEP | ONLY_MOMENTUM),
    "local_step, only momentum, plain": Case("local_step", OWN_STEP | ONLY_MOMENTUM | {"STEP_PRECONDITION": False}),
    "local_step, mixed": Case(
        "local_step", OWN_STEP | {"PARAMS": 3, "GRADS": 3, "STEP_EPS_INSIDE_SQRT": True, "STEP_LAST": True}
    ),
    "local_step, mixed, first": Case(
        "local_step", OWN_STEP | FIRST | {"PARAMS": 3, "GRADS": 3, "STEP_EPS_INSIDE_SQRT": True}
    ),
    "local_step, small blocks": Case("local_step", OWN_STEP | {"BLOCK_SIZE": 128}),
    "local_step, follows, mixed, first": Case("local_step", FOLLOWS | FIRST | {"PARAMS": 3, "GRADS": 3}),
    "local_step, follows, small blocks": Case("local_step", FOLLOWS | {"BLOCK_SIZE": 128}),
    "rebuild_momentum, of a round": Case("rebuild_momentum", TABLE | OF_A_ROUND),
    "rebuild_momentum, renews": Case("rebuild_momentum", OF_A_ROUND | V | RENEWS),
    "rebuild_momentum, eps inside": Case("rebuild_momentum", TABLE | OF_A_ROUND | V | {"EPS_INSIDE_SQRT": True}),
    "rebuild_momentum, small blocks": Case("rebuild_momentum", TABLE | OF_A_ROUND | V | {"BLOCK_SIZE": 128}),
    "lion_compress, mixed": Case("lion_compress", {"GRADS": 3}),
    "lion_compress, small blocks": Case("lion_compress", {"BLOCK_SIZE": 128}),
}
"""What else runs: must compile without spills; nothing else is limited."""
PER_LAYER = ("finish", "finish_alone", "close_parts", "lamb_coefficient", "lamb_rescale", "lamb_follow", "renew_levels")
PER_LAYER += ("follow_level",)
"""Kernels that scan what blocks left, one block to a lane."""
