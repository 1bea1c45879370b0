"""Packs, compresses, averages and applies: the kernels of fusedonebit by themselves.

They know tensors only: no process group, no optimizer. ``momentum_compress``, ``server_reduce`` and the others are the
registered ops ``torch.ops.fusedonebit.*``, each declared in one file with its kernel (``op``). Values that always
travel together are one argument (``nouns``).
"""

from . import nouns, rules
from .advance import advance
from .along import move_along
from .backends import backend, using
from .close_round import close_round
from .columns import LARGEST_GRADIENT, Coef, Group, Layer
from .compress import momentum_compress, settle
from .finish import SCALE_NORMS, finish
from .finish_alone import finish_alone
from .flat import TAIL, flatten, pack, unpack
from .freeze import exponents, freeze, live_variance, param_squares, rewarm, square_sums, update_sums
from .gradient_scaling import gradient_squares, scale_coefficients
from .jit import rule
from .lamb_ratios import lamb_follow, lamb_ratio, lamb_rescale
from .lamb_update import lamb_coefficient, lamb_move, lamb_update
from .layout import BLOCK_SIZES, FlatLayout, ScaleScope, Span, choose_block_size
from .levels import follow_level, tell_level
from .local_step import local_step, rebuild_momentum
from .local_update import local_update
from .marsit_signs import merge_signs, pick_owned, place_owned
from .outer import outer_compress, outer_mean
from .outer_scales import outer_scales
from .parts import close_parts
from .quantise import dequantise, quantise, requantise, take_back
from .receive import receive
from .reduce import server_reduce
from .renewal import renew, renew_levels
from .squares import average_squares, tell_squares
from .tables import LiveTable, live_table
from .update import adam_update, add_values, apply_momentum
from .vote import vote_op

lion_compress = vote_op("lion_compress", rules.lion)

__all__ = [
    "BLOCK_SIZES",
    "LARGEST_GRADIENT",
    "SCALE_NORMS",
    "TAIL",
    "Coef",
    "FlatLayout",
    "Group",
    "Layer",
    "LiveTable",
    "ScaleScope",
    "Span",
    "adam_update",
    "add_values",
    "advance",
    "apply_momentum",
    "average_squares",
    "backend",
    "choose_block_size",
    "close_parts",
    "close_round",
    "dequantise",
    "exponents",
    "finish",
    "finish_alone",
    "flatten",
    "follow_level",
    "freeze",
    "gradient_squares",
    "lamb_coefficient",
    "lamb_follow",
    "lamb_move",
    "lamb_ratio",
    "lamb_rescale",
    "lamb_update",
    "lion_compress",
    "live_table",
    "live_variance",
    "local_step",
    "local_update",
    "merge_signs",
    "momentum_compress",
    "move_along",
    "nouns",
    "outer_compress",
    "outer_mean",
    "outer_scales",
    "pack",
    "param_squares",
    "pick_owned",
    "place_owned",
    "quantise",
    "rebuild_momentum",
    "receive",
    "renew",
    "renew_levels",
    "requantise",
    "rewarm",
    "rule",
    "scale_coefficients",
    "server_reduce",
    "settle",
    "square_sums",
    "take_back",
    "tell_level",
    "tell_squares",
    "unpack",
    "update_sums",
    "using",
    "vote_op",
]
