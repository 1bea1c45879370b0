"""1-bit Muon: gradients travel to each matrix's owner, which orthogonalises their momentum; signs travel back.

``fusedonebit.reference`` has it line by line. Where EF21 (arXiv 2607.29674) keeps a tracker of each worker's momentum,
workers here add to gradients what was lost of earlier ones, before any momentum: that takes most of the noise away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..comm.carried import Carried
from ..comm.owned_signs import Shares
from ..core.algorithm import Algorithm
from ..core.frame import Frame
from ..core.members import Members
from ..core.optimizer import DistributedOptimizer
from ..core.options import averaged, is_int, is_number
from ..core.resolved import Options
from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Params, Ranks, Wire
from ..core.sharding import is_dtensor
from ..core.stage import Stage
from ..core.traits import Traits
from .averaging import Averaged, Update
from .muon_exchange import OneBit, OwnedExchange
from .orthogonal import Coefficients, Matrices, MuonUpdate, Orthogonaliser, is_matrix, orthogonalised
from .rest import Rest

COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
"""torch.optim.Muon's."""
NS_DTYPES = torch.bfloat16, torch.float32, torch.float64
"""Whose range gradients don't leave."""
EPS = 1e-8
"""AdamW's."""
LEAST, LARGEST = 1e-37, 1e38
"""Of numbers that Newton-Schulz takes: bfloat16 has them."""
LEAD = 0.1
"""How much of the direction is the newest gradient, where it arrives at a bit: twice as much as at momentum 0.95
otherwise, since error feedback delays gradients, which costs more than noise does."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Options):
    """Settings of Muon. See ``OneBitMuon`` for their meaning."""

    nesterov: bool
    ns_coefficients: Coefficients
    ns_steps: int
    ns_dtype: torch.dtype
    ns_eps: float
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    takes: ClassVar[frozenset[str]] = (Options.takes | {"average_dtype", "state"}) - {
        "mask",
        "model_parallel",
        "bias_correction",
        "eps_inside_sqrt",
        "capturable",
    }
    usual: ClassVar[dict[str, Any]] = {"bias_correction": True}
    recorded: ClassVar[tuple[str, ...]] = (*Options.recorded, "nesterov", "ns_steps", "ns_dtype", "adjust_lr_fn")

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        coefficients, steps, dtype, eps = self.ns_coefficients, self.ns_steps, self.ns_dtype, self.ns_eps
        if self.numerics.state == "8bit":
            raise ValueError(
                'state must be "fp32" or "bf16" with OneBitMuon, got "8bit": rows and columns of what is left are '
                "summed where they lie"
            )
        if not (is_int(steps) and 1 <= steps < 100):
            raise ValueError(f"ns_steps must be an int from 1 to 99, got {steps!r}")
        if dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype must be one of {', '.join(map(str, NS_DTYPES))}, got {dtype!r}")
        three = isinstance(coefficients, tuple) and len(coefficients) == 3
        if not three or not all(is_number(c) and abs(c) <= LARGEST for c in coefficients):
            raise ValueError(
                f"ns_coefficients must be three finite numbers, none above {LARGEST}, got {coefficients!r}"
            )
        if not (is_number(eps) and LEAST <= eps <= LARGEST):
            raise ValueError(f"eps must be a finite number from {LEAST} to {LARGEST}, got {eps!r}")


class Muon(Algorithm):
    """1-bit Muon: bits from the first step on; a rank alone has nobody to send them to, and is torch's Muon."""

    traits: ClassVar = Traits(MuonOptions, {"one-bit": True}, continues=False, corrects=True)
    options: MuonOptions
    exchange: OwnedExchange | None = None
    exchange_kind: ClassVar[type[OwnedExchange]] = OwnedExchange

    @classmethod
    def check(cls, frame: Frame) -> None:
        """Raise ValueError for parameters that are no matrices, and for momenta that differ."""
        super().check(frame)
        _check_groups(frame.groups)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        options, plist = self.options, frame.parameters
        self._trained = [(group["algorithm"], group["stacks"]) for group in frame.groups]
        count = sum(not averaged(frame.groups[group]) for group in plist.group_of)
        members = Members(frame, range(count))
        matrices = Matrices.of(members, frame, options.adjust_lr_fn)
        self.rest = Rest(frame, Members(frame, range(count, len(plist)))) if count < len(plist) else None
        how: dict[str, Any] = {"steps": options.ns_steps, "eps": options.ns_eps, "dtype": options.ns_dtype}
        orthogonalise = partial(orthogonalised, coefficients=options.ns_coefficients, **how)
        shards, wide = frame.ranks.shards.transport, options.ns_dtype is not torch.bfloat16
        orthogonaliser = partial(Orthogonaliser, orthogonalise, options.ns_dtype, shards, frame.device)
        rest = () if self.rest is None else (self.rest,)
        if frame.ranks.transport.world_size == 1 or not count:
            update = MuonUpdate(frame, matrices, partial(_shares, frame, options.nesterov, 0.0), orthogonaliser)
            updates = (update, *rest) if count else rest
            self._stage: Stage = Averaged(frame, Both(updates))
            self.parts = (*updates, self._stage)
        else:
            shares = partial(_shares, frame, options.nesterov, LEAD)
            carried = None if self.rest is None else self._carried(self.rest)
            whitening = torch.float32 if wide else torch.bfloat16
            self.exchange = self.exchange_kind(frame, matrices, shares, orthogonaliser, carried, whitening)
            self._stage = OneBit(frame, self.exchange, self.rest)
            self.parts = (self.exchange, *rest, self._stage)

    def _carried(self, rest: Rest) -> Carried:
        world_size = self.frame.ranks.transport.world_size
        return Carried(rest.members.layout, world_size, self.options.wire.average_dtype, self.frame.device)

    @property
    def stage(self) -> Stage:
        return self._stage

    def check_groups(self, groups: Sequence[Mapping[str, Any]], where: str = "") -> None:
        """Raise ValueError as at first; RuntimeError if a group is trained by something else than then."""
        for number, (group, before) in enumerate(zip(groups, self._trained, strict=False)):
            for name, was in zip(("algorithm", "stacks"), before, strict=True):
                if group[name] != was:
                    raise RuntimeError(
                        f"{name} of group {number} must stay {was!r}, got {group[name]!r}: construct a new optimizer"
                    )
        _check_groups(groups, where)

    def check_growth(self) -> None:
        if self.frame.steps.outcomes.attempts:
            raise RuntimeError("add_param_group must be called before the first step; construct a new optimizer")

    def momentum(self, param: Tensor) -> Tensor:
        i, plist = self.frame.index(param), self.frame.parameters
        if averaged(self.frame.groups[plist.group_of[i]]):
            return self.value_of("exp_avg", i).to(torch.float32, copy=True)
        if self.exchange is None:
            return self.value_of("momentum_buffer", i).to(torch.float32, copy=True)
        return plist.shaped(self.exchange.momentum(i).reshape(-1), i, 0).clone()


def _momentum(groups: Sequence[Mapping[str, Any]]) -> float:
    """Return that of the first group of matrices."""
    return next((group["momentum"] for group in groups if not averaged(group)), 0.0)


def _shares(frame: Frame, nesterov: bool, lead: float) -> Shares:
    """Return those of this step, for its momentum may have changed; the newest gradient's is at least ``lead``."""
    momentum = _momentum(frame.hyper.taken)
    return Shares(momentum, max(lead, 1 - momentum) if nesterov else 0.0)


def _check_groups(groups: Sequence[Mapping[str, Any]], where: str = "") -> None:
    """Raise ValueError for the first of all groups that is no group of 1-bit Muon's."""
    for number, group in enumerate(groups):
        _check_group(group, _momentum(groups), f" in group {number}{where}")


def _check_group(group: Mapping[str, Any], momentum: float, where: str) -> None:
    """Raise ValueError for a parameter that is trained as a matrix, and is none, and for another momentum."""
    stacks = group["stacks"]
    if averaged(group):
        if stacks != 1:
            raise ValueError(f'stacks must be 1 where algorithm is "adamw", got {stacks}{where}')
        return
    if group["momentum"] != momentum:
        raise ValueError(f"momentum must be the same in all groups, {momentum}, got {group['momentum']}{where}")
    if group["eps"] != EPS:
        raise ValueError(f"eps of matrices must be OneBitMuon's argument, got {group['eps']!r}{where}: leave it out")
    for p in group.get("params", ()):
        if not isinstance(p, Tensor):  # of a checkpoint, which has numbers
            continue
        if is_dtensor(p) and is_matrix(p) and (not p.placements[0].is_shard(0) or p.stride(0) < max(p.stride())):
            raise ValueError(
                f'params must be sharded by rows where algorithm is "muon", got {p.placements} for shape '
                f"{tuple(p.shape)}, strides {p.stride()}{where}: leave out shard_placement_fn of fully_shard()"
            )
        if stacks > 1 and is_matrix(p) and (p.shape[0] % stacks or p.stride(0) < max(p.stride())):
            raise ValueError(
                f"stacks must divide the first dimension of parameters, the slowest in memory, got {stacks} for shape "
                f"{tuple(p.shape)}, strides {p.stride()}{where}"
            )
        if not is_matrix(p):
            raise ValueError(
                f'params must be matrices where algorithm is "muon", got shape {tuple(p.shape)}, strides {p.stride()}'
                f"{where}: put vectors, and the first and the last layer, into a group with "
                'algorithm="adamw"; of kernels the first dimension must be the slowest in memory'
            )


class Both(NamedTuple):
    """Updates matrices, then the rest."""

    updates: tuple[Update, ...]

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make each update, as ``averaging.Update``."""
        for update in self.updates:
            update(grads, coef, skip, *found)


class OneBitMuon(DistributedOptimizer):
    r"""Muon whose matrices travel at a bit each way, from the first step on.

    .. math::
        c_i = e_i + g_i P, \quad e_i \leftarrow c_i - C(c_i), \quad
        d = \frac{1}{W} \sum_i C(c_i), \quad m \leftarrow \mu m + (1 - \mu) d, \quad
        x \leftarrow x - \gamma (s \, \mathrm{sgn}(O((a d + (1 - a) m) P^{-1})) + \lambda x)

    with O Newton-Schulz, s its update's root mean square, and P the inverse root of the momentum's Gram matrix, which
    owners make anew every 100 steps (``fusedonebit.reference.onebit_muon``). C keeps signs and scales of rows and
    columns. Each matrix has an owner, which alone has its momentum, and orthogonalises it; a is at least 0.1, since
    error feedback delays gradients, and 0 without Nesterov. There is no warm-up, and no variance. A rank alone sends
    nothing: it is torch's Muon.

    Vectors, embeddings and the last layer are trained by AdamW, on averages that travel in the same messages, in
    groups that say so::

        OneBitMuon([{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": 3e-4}], lr=0.02)

    Args:
        params, process_group, numerics, wire, faults: As for ``OneBitAdam``. A tensor of more than two dimensions is a
            matrix with a row for each of its first one. Shards of rows (FSDP2) are orthogonalised as whole matrices.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: As torch.optim.Muon's;
            momentum is the same in all groups.
        algorithm: "muon", or "adamw", of groups. Groups of matrices may have "stacks" as well: of how many matrices,
            one above the other, each parameter is one, such as 3 of queries, keys and values in one layer. Each is
            orthogonalised by itself.
        betas: AdamW's; its eps is 1e-8.
        ns_dtype: In which Newton-Schulz computes; and whitening, where that is ``torch.bfloat16``, else in float32.
        max_grad_norm: Clip gradients by the mean of the ranks' norms; None: don't.
    """

    kind = Muon

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        algorithm: Literal["muon", "adamw"] = "muon",
        betas: tuple[float, float] = (0.9, 0.95),
        ns_dtype: torch.dtype = torch.bfloat16,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"algorithm": algorithm, "betas": betas, "eps": EPS, "stacks": 1}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        own: dict[str, Any] = {
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients) if isinstance(ns_coefficients, list) else ns_coefficients,
            "ns_steps": ns_steps,
            "ns_eps": eps,
        }
        own |= {"ns_dtype": ns_dtype, "adjust_lr_fn": "original" if adjust_lr_fn is None else adjust_lr_fn}
        super().__init__(params, defaults, **shared, **own, max_grad_norm=max_grad_norm)
