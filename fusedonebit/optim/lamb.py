"""LAMB (You et al., 2020), as 1-bit LAMB's equation (2) states it: a distributed optimizer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer
from ..core.part import Part
from ..core.resolved import Options
from ..core.settings import FAULTS, LAYERWISE, NUMERICS, WIRE, Faults, Layerwise, Numerics, Params, Ranks, Wire
from ..core.state_tensor import StateTensor
from ..core.traits import Traits
from ..triton_kernels import Coef, Layer, lamb_coefficient, lamb_move, lamb_update, square_sums
from .averaging import Averaged
from .moments import MomentBuffers


@dataclass(frozen=True, kw_only=True)
class LambOptions(Options):
    """Settings of ``Lamb``."""

    layerwise: Layerwise

    objects: ClassVar[dict[str, Any]] = {**Options.objects, "layerwise": Layerwise}
    takes: ClassVar[frozenset[str]] = Options.takes | {"c_min", "c_max", "beta3", "state"}
    recorded: ClassVar[tuple[str, ...]] = (*Options.recorded, "state")
    grouped: ClassVar[tuple[str, ...]] = (*Options.grouped, "c_min", "c_max", "beta3")


COLUMNS = {Coef.C_MIN: "c_min", Coef.C_MAX: "c_max", Coef.BETA3: "beta3"}
"""Hyper-parameters of groups of which coefficients are made."""


class LambLayers(Part):
    """LAMB's coefficients, one for each tensor, and what makes them of norms.

    Args:
        frame: Of the optimizer.

    Attributes:
        table: float32 [rows of ``Layer``, tensors].
        start: int64 [tensors + 1], the first block of each; padding behind the last counts as its own: its sums are
            zero.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame, layout, device = frame, frame.layout, frame.device
        self.table = torch.zeros(len(Layer), len(layout.sizes), device=device)
        self.table[Layer.RATIO] = 1.0
        self.start = torch.tensor([*layout.first_block[:-1], layout.n_blocks], device=device)
        self._one_each = torch.arange(len(layout.sizes) + 1, device=device)

    @contextmanager
    def kept(self, *tables: Tensor) -> Iterator[None]:
        """Keep tables [..., tensors] as they were for layers without a gradient."""
        if self.frame.absent is None:
            yield
            return
        before = [table.clone() for table in tables]
        yield
        for table, was in zip(tables, before, strict=True):
            table.copy_(torch.where(self.frame.absent, was, table))

    def whole(self, values: Tensor, reduction: str = "sum") -> tuple[Tensor, Tensor]:
        """Return values [..., B] and each tensor's first block, for kernels; of shards one column per tensor."""
        shards = self.frame.ranks.shards
        if shards.count == 1:
            return values, self.start
        reduce = shards.sum if reduction == "sum" else shards.max
        return reduce(self.segments(values, reduction)), self._one_each

    def segments(self, by_block: Tensor, reduction: str = "sum") -> Tensor:
        """Return each tensor's sum or maximum of values [..., B] here: [..., tensors]; 0 where nothing of it is."""
        flat = by_block.reshape(-1, by_block.shape[-1])
        rows = [torch.segment_reduce(row, reduction, offsets=self.start, initial=0.0) for row in flat]
        return torch.stack(rows).view(*by_block.shape[:-1], -1)

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Return that of each tensor's live elements, float64 [tensors], of values float32 [P]."""
        return self.segments(square_sums(self.frame.places, flat))

    def stats_of(self, exp_avg_sq: Tensor) -> dict[str, list[Any]]:
        """Return what ``layer_stats`` tells, where ``exp_avg_sq``, [P], follows the gradients."""
        average, ratio, coefficient = (row.tolist() for row in self.table)
        norms = self.sum_of_squares(exp_avg_sq).sqrt().tolist()
        return {"coefficient": coefficient, "average": average, "ratio": ratio, "variance_norm": norms}

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        return (StateTensor("layer", "tensor", self.table),)

    def held(self) -> Sequence[Tensor]:
        return self.start, self._one_each


class LambUpdate(Part):
    """LAMB's update from averaged gradients, equation (2): what ``Lamb`` does always, and 1-bit LAMB in its warm-up.

    Args:
        frame: Of the optimizer.
        moments: Which it updates.
        layers: Their coefficients.

    Attributes:
        norms: float64 [2, B], sums of x^2 and u^2 by block, of one step.
        skips_ones: Whether coefficients of 1 stay out of their moving average.
    """

    skips_ones = False

    def __init__(self, frame: Frame, moments: MomentBuffers, layers: LambLayers) -> None:
        self._moments, self._layers = moments, layers
        self.make_room()

    def make_room(self) -> None:
        """Allocate ``norms``."""
        frame = self._layers.frame
        self.norms = torch.zeros(2, frame.layout.n_blocks, dtype=torch.float64, device=frame.device)

    def drop_room(self) -> None:
        """Give ``norms``' memory back."""
        self.norms = self.norms[:, :0].clone()

    def __call__(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        """Make one update, as ``averaging.Update``."""
        moments, layers, frame = self._moments, self._layers, self._layers.frame
        dense, moved = frame.parameters.dense, (moments.stored, frame.options.numerics.eps_inside_sqrt, coef, skip)
        lamb_update(dense, grads, frame.places, *moved, moments.squares, self.norms, *found)
        norms, start = layers.whole(self.norms)
        with layers.kept(layers.table):
            lamb_coefficient(norms, start, skip, self.skips_ones, coef, layers.table)
        lamb_move(dense, frame.places, *moved, frame.rounding)

    def scratch(self) -> Sequence[Tensor]:
        return (self.norms,)

    def layer_stats(self) -> dict[str, list[Any]]:
        return self._layers.stats_of(self._moments.exp_avg_sq)


class AveragedLamb(Algorithm):
    """LAMB on averaged gradients, or on those of a rank alone."""

    traits: ClassVar = Traits(LambOptions, columns=COLUMNS, compresses=False)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        moments, layers = self.moments, self.layers = MomentBuffers(frame), LambLayers(frame)
        update = LambUpdate(frame, moments, layers)
        self._averaged = Averaged(frame, update, in_place=True)
        self.parts = (moments, layers, update, self._averaged)

    @property
    def stage(self) -> Averaged:
        return self._averaged


class Lamb(DistributedOptimizer):
    r"""LAMB on gradients that the optimizer itself averages over the ranks, in float32.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
        u = \frac{m}{\sqrt v + \epsilon} + \lambda x, \\
        c = \mathrm{clip}\left(\frac{\|x\|}{\|u\|}, c_{min}, c_{max}\right), \quad x \leftarrow x - \gamma c u

    with one coefficient c per tensor, 1 where a norm is zero (1-bit LAMB, Li et al., 2021, eq. 2).
    Three kernels, whatever the number of tensors, one fp32 all-reduce. Give it local gradients; with DDP
    call ``fusedonebit.ddp.attach``. After every step parameters are bit-identical on all ranks.

    Args:
        params, lr, betas, eps, process_group, numerics, wire, faults: As for ``OneBitAdam``; groups may also set c_min,
            c_max and beta3.
        weight_decay: Part of u, so of its norm.
        max_grad_norm: Clip gradients to this global norm; None: don't. Exactly, by the norm of the averaged gradient.
        layerwise: Defaults of c_min, c_max and beta3; of the coefficients' moving average, which beta3 is of, only
            ``OneBitLamb`` makes use, if it continues from this optimizer's checkpoint.

    Example::

        optimizer = Lamb(model.parameters(), lr=1e-2)
        loss.backward()
        optimizer.step()
    """

    kind = AveragedLamb

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        layerwise: Layerwise = LAYERWISE,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        super().__init__(params, defaults, **shared, layerwise=layerwise, max_grad_norm=max_grad_norm)
