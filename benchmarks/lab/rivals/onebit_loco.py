"""1-bit LoCo: AdamW by oneself for H steps, then the mean of what all have come, in signs with error feedback.

It is nobody's yet: local AdamW whose differences travel as ``ef_sgdm``'s directions do, and whose errors fade as
SparseLoCo's do. There is no outer momentum: errors that are kept are one.
"""

from __future__ import annotations

from torch import Tensor

from ..setting import Params, Setting
from .codes import CodedAllReduce, SignCode
from .frame import RoundRival
from .quantised import BLOCK
from .sparseloco import ERROR_DECAY


class OneBitLoCo(RoundRival):
    """Average what workers have come in H steps in one bit, and move there.

    Args:
        length: H.
    """

    def __init__(self, params: Params, of: Setting, length: int) -> None:
        super().__init__(params, of, length, error_decay=ERROR_DECAY, block=BLOCK)
        self.mean_of = CodedAllReduce(self.wires, SignCode(self.blocks_of(BLOCK)), self.anchor)

    def meet(self, deltas: Tensor) -> None:
        self.anchor.sub_(self.mean_of(deltas, kept=ERROR_DECAY))
