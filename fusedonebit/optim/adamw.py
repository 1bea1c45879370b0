"""AdamW (Loshchilov & Hutter, 2019), uncompressed: for one GPU, or several over a network that is fast enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.settings import FAULTS, NUMERICS, WIRE, Faults, Numerics, Options, Params, Ranks, Wire
from ..core.state.spec import StateSpec
from ..triton_kernels.codes import decode, encode
from .averaging import AdamUpdate


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

    def build(self) -> None:
        """See ``Keeper``; also make room for the octaves of codes of both moments, by block."""
        super().build()
        self._octaves: Tensor | None = None
        if self.options.state == "8bit":
            self._octaves = torch.zeros(2, self.layout.n_blocks, dtype=torch.uint8, device=self.device)

    @property
    def _narrowed(self) -> tuple[Tensor | None, ...]:
        return super()._narrowed[0], self._octaves

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *([] if self._octaves is None else [self._octaves])]

    def part_of(self, spec: StateSpec, i: int) -> Tensor:
        """See ``Keeper``; a copy of what is kept in codes."""
        if not self._is_coded(spec):
            return super().part_of(spec, i)
        codes, octaves = self._codes_of(spec, i)
        x = decode(codes, octaves, signed=not spec.not_negative).view(-1)
        return self.parameters.shaped(x, i, 0).clone()

    def keep_part(self, spec: StateSpec, i: int, part: Tensor) -> None:
        """See ``Keeper``; codes stand for what is nearest."""
        if not self._is_coded(spec):
            return
        codes, octaves = self._codes_of(spec, i)
        x = torch.zeros(codes.shape, device=self.device)
        self.parameters.shaped(x.view(-1), i, 0).copy_(part)
        signed = not spec.not_negative
        encode(x, codes, octaves, signed=signed, nonzero=not signed)

    def _is_coded(self, spec: StateSpec) -> bool:
        return self._octaves is not None and bool(spec.kept_in)

    def _codes_of(self, spec: StateSpec, i: int) -> tuple[Tensor, Tensor]:
        """Return the blocks of one parameter: codes uint8 [blocks, block_size], and their octaves."""
        assert self._octaves is not None
        blocks = slice(*self.layout.first_block[i : i + 2])
        codes = spec.tensor(self).view(self.layout.n_blocks, -1)[blocks]
        return codes, self._octaves[1 if spec.not_negative else 0, blocks]
