"""LAMB (You et al., 2020), as 1-bit LAMB's equation (2) states it: a distributed optimizer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.frame import Frame
from ..core.optimizer import DistributedOptimizer
from ..core.settings import FAULTS, LAYERWISE, NUMERICS, WIRE, Faults, Layerwise, Numerics, Options, Params, Ranks, Wire
from ..core.spec import Specs, StateSpec
from ..triton_kernels import Coef, Layer, lamb_coefficient, lamb_move, lamb_update, square_sums
from .averaging import Averaging
from .narrow_state import NarrowState


@dataclass(frozen=True, kw_only=True)
class LambOptions(Options, Layerwise):
    """Settings of ``Lamb``."""

    objects: ClassVar[dict[str, Any]] = {**Options.objects, "layerwise": Layerwise}
    takes: ClassVar[frozenset[str]] = Options.takes | {"c_min", "c_max", "beta3", "state"}
    told: ClassVar[tuple[str, ...]] = (*Options.told, "state")
    grouped: ClassVar[tuple[str, ...]] = (*Options.grouped, "c_min", "c_max", "beta3")


class LambUpdate(NarrowState):
    """The update of equation (2): what ``Lamb`` does always, and ``OneBitLamb`` in its warm-up."""

    columns: ClassVar = {Coef.C_MIN: "c_min", Coef.C_MAX: "c_max", Coef.BETA3: "beta3"}
    kept: ClassVar[Specs] = (*Averaging.kept, StateSpec("layer", "tensor", "_layers", rows=len(Layer)))
    _layers: Tensor
    _deepspeed = False

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        layout, device = frame.layout, frame.device
        self._layers[Layer.RATIO] = 1.0
        # Padding behind the last tensor counts as its own: its sums are zero.
        self._layer_start = torch.tensor([*layout.first_block[:-1], layout.n_blocks], device=device)
        self._one_each = torch.arange(len(layout.sizes) + 1, device=device)
        self._norms = torch.zeros(2, layout.n_blocks, dtype=torch.float64, device=device)

    def held(self) -> list[Tensor]:
        return [*super().held(), self._layer_start, self._one_each]

    def scratch(self) -> list[Tensor]:
        return [self._norms]

    def _update(self, grads: Sequence[Tensor], coef: Tensor, skip: Tensor, *found: Tensor | None) -> None:
        frame = self.frame
        dense, moved = frame.parameters.dense, (self.moments, self.options.eps_inside_sqrt, coef, skip)
        lamb_update(dense, grads, frame.places, *moved, self._exp_avg_sq_sums, self._norms, *found)
        norms, start = self._by_layer(self._norms)
        with self._layers_kept(self._layers):
            lamb_coefficient(norms, start, skip, self._deepspeed, coef, self._layers)
        lamb_move(dense, frame.places, *moved, frame.rounding)

    @contextmanager
    def _layers_kept(self, *tables: Tensor) -> Iterator[None]:
        """Keep tables [..., tensors] as they were for layers without a gradient."""
        if self.frame.absent is None:
            yield
            return
        before = [table.clone() for table in tables]
        yield
        for table, was in zip(tables, before, strict=True):
            table.copy_(torch.where(self.frame.absent, was, table))

    def _by_layer(self, values: Tensor, reduction: str = "sum") -> tuple[Tensor, Tensor]:
        """Return values [..., B] and each tensor's first block, for kernels; of shards one column per tensor."""
        frame = self.frame
        if frame.ranks.shards.count == 1:
            return values, self._layer_start
        whole = frame.ranks.shards.sum if reduction == "sum" else frame.ranks.shards.max
        return whole(self._segments(values, reduction)), self._one_each

    def _segments(self, by_block: Tensor, reduction: str) -> Tensor:
        """Return each tensor's sum or maximum of values [..., B] here: [..., tensors]; 0 where nothing of it is."""
        flat = by_block.reshape(-1, by_block.shape[-1])
        rows = [torch.segment_reduce(row, reduction, offsets=self._layer_start, initial=0.0) for row in flat]
        return torch.stack(rows).view(*by_block.shape[:-1], -1)

    def _variance(self) -> Tensor:
        """Return the variance that follows the gradients, float32 [P]."""
        return self.exp_avg_sq

    def _sum_of_squares(self, flat: Tensor) -> Tensor:
        """Return that of each tensor's live elements, float64 [tensors], of values float32 [P]."""
        return self._segments(square_sums(self.frame.places, flat), "sum")

    def layer_stats(self) -> dict[str, list[Any]]:
        average, ratio, coefficient = (row.tolist() for row in self._layers)
        return super().layer_stats() | {
            "coefficient": coefficient,
            "average": average,
            "ratio": ratio,
            "variance_norm": self._sum_of_squares(self._variance()).sqrt().tolist(),
        }


class AveragedLamb(LambUpdate):
    """LAMB on averaged gradients."""

    settings: ClassVar[type[Options]] = LambOptions
    compresses: ClassVar = False
    reads_gradients: ClassVar = True


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
