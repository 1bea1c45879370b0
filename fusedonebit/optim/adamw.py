"""AdamW (Loshchilov & Hutter, 2019), uncompressed: for one GPU, or several over a network that is fast enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Options, Params, Ranks, Wire
from .adam_update import AdamUpdate


@dataclass(frozen=True, kw_only=True)
class AdamWOptions(Options):
    """Settings of ``AdamW``."""

    bias_correction: bool = True
    takes: ClassVar = Options.takes - {"eps_inside_sqrt"} | {"state"}
    told: ClassVar = (*Options.told, "state")


class AdamW(AdamUpdate):
    r"""AdamW as ``torch.optim.AdamW``, in two launches, whatever the number of tensors.

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
        x \leftarrow (1 - \gamma \lambda) x - \gamma \frac{\hat m}{\sqrt{\hat v} + \epsilon}

    It is the warm-up of ``OneBitAdam``. One rank alone reads gradients where they lie, and takes them as they are: an
    element that is not finite, or larger than 1.8e19, stays as it is with its moments (in codes, as far as their
    block's range allows), and all others move; ``stats()["partial_steps"]`` counts such steps.
    ``Faults(nonfinite="raise")`` looks at all of them first. Several ranks average gradients in float32 by one
    all-reduce, skip a step in which any is not finite, and have bit-identical parameters after each step; give it local
    gradients, or call ``fusedonebit.ddp.attach``.

    Of torch's keywords ``maximize`` is in ``Numerics``, and ``capturable`` in ``Wire``; ``foreach`` and ``fused`` have
    nothing to choose here, and there is no ``amsgrad``.

    Args:
        params, lr, betas, eps, process_group, numerics, wire, faults: As for ``OneBitAdam``.
        weight_decay: Decoupled.
        max_grad_norm: Clip gradients to this global norm, which is exact, for one more read of them; None: don't.

    Example::

        optimizer = AdamW(model.parameters(), lr=1e-3)
        loss.backward()
        optimizer.step()
    """

    settings: ClassVar[type[Options]] = AdamWOptions
    compresses: ClassVar = False
    reads_gradients: ClassVar = True
    corrects: ClassVar = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        process_group: Ranks = None,
        numerics: Numerics = NUMERICS,
        wire: Wire = WIRE,
        faults: Faults = FAULTS,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        shared: dict[str, Any] = {"process_group": process_group, "numerics": numerics, "wire": wire, "faults": faults}
        super().__init__(params, defaults, **shared, max_grad_norm=max_grad_norm)
