"""1-bit LAMB (Li et al., 2021) as a plain ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import singledispatch
from importlib import import_module
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..core.optimizer import DistributedOptimizer
from ..core.settings import FAULTS, LAYERWISE, NUMERICS, WIRE, Faults, Freeze, Layerwise, Numerics, Params, Ranks, Wire
from ..triton_kernels import Coef
from .averaging import Averaged
from .compressed_lamb import FollowedLamb, PaperLamb
from .lamb import COLUMNS, LambLayers, LambUpdate
from .onebit_lamb_options import OneBitLambOptions
from .onebit_options import Variance
from .two_stage import TwoStage


@singledispatch
def parts_of(layerwise: Layerwise) -> tuple[type[LambUpdate], type[PaperLamb]]:
    """Return what updates in the warm-up, and the stage after a freeze; subclasses of ``Layerwise`` register theirs."""
    return LambUpdate, PaperLamb


class TwoStageLamb(TwoStage):
    """1-bit LAMB: averaged updates of LAMB, then steps in bits, or momentum."""

    traits: ClassVar = TwoStage.traits._replace(
        settings=OneBitLambOptions,
        columns=COLUMNS | {Coef.R_MIN: "r_min", Coef.R_MAX: "r_max", Coef.R_THRESHOLD: "r_threshold"},
        corrects=False,
    )
    options: OneBitLambOptions

    def make_stages(self) -> None:
        frame, options = self.frame, self.options
        layers = LambLayers(frame)
        update_kind, frozen_kind = parts_of(options.layerwise)
        update = update_kind(frame, self.moments, layers)
        kind = FollowedLamb if options.shares_variance else frozen_kind
        stage = self.compression = kind(frame, self.moments, self.warm_up, layers, update)
        self.averaged = Averaged(frame, update, beside=stage.exchange, table=stage.table)


class OneBitLamb(DistributedOptimizer):
    r"""LAMB whose communication shrinks to one bit per parameter after a short warm-up.

    Warm-up: ``Lamb``. From then on the step itself is what is compressed, and tells how large it is: of each layer

    .. math::
        c_i = \beta_1 m + (1 - \beta_1) \, c_t \frac{g_i}{\sqrt{\hat v} + \epsilon} + e_i, \quad
        m = C\left(\tfrac{1}{W} \sum_i C(c_i) + E\right), \quad \|u_t\| = \frac{0.44}{c_t} \|\hat m\|, \\
        x \leftarrow x - \gamma \min\left(1, \frac{c(\|u_t\|)}{c_t}\right) \hat m - \gamma c_t \lambda x, \quad
        c_{t+1} = c\left(\overline{\|u\|}\right), \quad
        c(u) = \mathrm{clip}\left(\frac{\|x\|}{u}, c_{min}, c_{max}\right)

    where v is shared, as ``OneBitAdam``'s, the mean of norms remembers by beta3, and 0.44 is the share that a layer's
    update has in the norm of the bits that stand for it, with their noise (docs/numerics.md). One kernel more than
    ``OneBitAdam``, no state of a parameter's size.

    With ``freeze_step`` it is the paper's: the warm-up also keeps a moving average :math:`c_{avg}` of each layer's
    coefficient. After it :math:`c_{avg}` and the variance, now :math:`v_{T_w}`, are frozen; the momentum travels as it
    is, each layer's scaled to the same size, and (1-bit LAMB, Algorithm 1, lines 15 to 21)

    .. math::
        g = \frac{m_t - \beta_1 m_{t-1}}{1 - \beta_1}, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g^2, \quad
        r_t = \left\| \frac{v_{T_w}}{v_t} \right\|_\infty \text{, clipped to } (1 \pm r_{threshold}) r_{t-1}
        \text{ and } [r_{min}, r_{max}], \\
        x \leftarrow x - \gamma \, r_t \, c_{avg} \left( \frac{m_t}{\sqrt{v_{T_w}} + \epsilon} + \lambda x \right)

    so that the layers' learning rates go on adapting although only bits are known.

    Args:
        params, lr, betas, eps, freeze_step, warmup, total_steps, variance, max_grad_norm: As for ``OneBitAdam``; groups
            may also set c_min, c_max, beta3, r_min, r_max, r_threshold.
        process_group, numerics, wire, faults: As for ``OneBitAdam``.
        weight_decay: Part of u, in the compression stage too.
        layerwise: Defaults of c_min, c_max, beta3, r_min, r_max and r_threshold, and what becomes of the coefficients
            after the freeze; see ``Layerwise``.

    Example::

        optimizer = OneBitLamb(model.parameters(), lr=1e-2)
        loss.backward()
        optimizer.step()
    """

    kind = TwoStageLamb
    algorithm: TwoStageLamb

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | Literal["auto"] | Freeze | None = None,
        warmup: int | float | None = None,
        total_steps: int | None = None,
        variance: Variance | None = None,
        max_grad_norm: float | None = None,
        layerwise: Layerwise = LAYERWISE,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        shared |= {"variance": variance, "warmup": warmup, "total_steps": total_steps}
        shared |= {"layerwise": layerwise, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults, **shared, freeze_step=freeze_step)

    @classmethod
    def from_deepspeed(
        cls, params: Params, config: Mapping[str, Any], process_group: Ranks = None, **options: Any
    ) -> OneBitLamb:
        """Make the optimizer that a DeepSpeed config describes; see ``fusedonebit.deepspeed.from_config``."""
        make: Callable[..., OneBitLamb] = import_module("fusedonebit.deepspeed").from_config  # it imports this module
        return make(params, config, process_group, kind=cls, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes in this context only accumulate, where ``overlap=True``; the one after it sends."""
        return self.algorithm.compression.exchange.reducer.paused()

    def worker_error(self, param: Tensor) -> Tensor:
        """Return this rank's residual e of one parameter, in units of the momentum, float32 of its shape."""
        return self.algorithm.worker_error(param)
