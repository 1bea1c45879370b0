"""Algorithms that work in rounds: between two synchronisations each worker moves by itself, and nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import Told
from ..core.compressing import Compressing
from ..core.frame import Frame
from ..core.header import COUNT, INT, Field, Fields, list_of
from ..core.scaling import Agreed
from ..core.settings import Options
from ..core.telemetry import upload


@dataclass(frozen=True, kw_only=True)
class RoundOptions(Options):
    """Settings of an optimizer that works in rounds."""

    def check(self) -> None:
        """Raise ValueError for the first setting that makes no sense."""
        super().check()
        if self.capturable:
            raise ValueError("capturable must be False, got True: what a step does depends on its place in the round")


ANCHOR: dict[str, Any] = {"only": "local", "given": True, "optional": True, "holds_parameters": True}
"""Of ``StateSpec``: a copy of the parameters as all ranks had them, kept within a round alone."""


class RoundAlgorithm(Compressing):
    """Skeleton of an algorithm that works in rounds of ``round_steps`` steps; see ``marsit`` and ``zero_one``.

    In all but the last each worker moves its own parameters (``_step_alone``). In the last they agree on what the
    round has made of the parameters that all had when it began, and have the same again.
    """

    options: RoundOptions
    takes_shards: ClassVar = False
    masters_of_rank: ClassVar = True
    header_fields: ClassVar[Fields] = {
        "local": Field(COUNT, at="_local"),
        "tag": Field(INT, at="_tag"),
        "missed": Field(list_of(COUNT), False, "index", "_missed"),
    }
    _anchor: Tensor
    """The parameters that all ranks have, while each moves by itself: float32 [P + TAIL]."""

    def __init__(self, frame: Frame) -> None:
        self._local = self._tag = 0  # steps done in this round, and a hash of all of their hyper-parameters
        self._missed: Sequence[int] = ()  # tensors of which this rank has had no gradient in this round
        self._held_error: Exception | None = None
        self._unsettled: list[tuple[int, Any]] = []  # rounds that may have been skipped: attempt, and which it was
        self._no_flags = torch.zeros(1, dtype=torch.int32, device=frame.device)
        super().__init__(frame)

    def close(self) -> None:
        super().close()
        self._anchor = self._anchor[:0].clone()

    def held(self) -> list[Tensor]:
        return [*super().held(), self._anchor, self._no_flags]

    @property
    def round_steps(self) -> int:
        """Return the length of this round."""
        raise NotImplementedError

    @property
    def synchronised(self) -> bool:
        """Tell whether all ranks have the same parameters now: between two rounds, not within one."""
        return self._local == 0

    @property
    def _round_start(self) -> Tensor:
        return self._anchor[: self.frame.layout.numel]

    @property
    def _kept_now(self) -> Tensor | None:
        """Return where the parameters go that all ranks have, while a round begins."""
        return self._round_start if self._local == 0 else None

    @property
    def averages_gradients(self) -> bool:
        """Return False: workers update with their own."""
        return False

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        frame = self.frame
        self._missed = tuple(i for i in frame.missing if self._local == 0 or i in self._missed)
        if self._local < self.round_steps - 1:
            return self._move_alone(grads, coef)
        alone = self._local
        flags = super().exchange(grads, coef, abort or self._held_error is not None)
        if frame.absent is not None:
            frame.steps.of_each -= frame.absent * alone
        return flags

    def _move_alone(self, grads: Sequence[Tensor], coef: Tensor) -> Tensor:
        self._step_alone(grads, self._scaling(grads, coef, alone=True), coef)
        self._tag = self._mixed_tag()
        self._local += 1
        return self._no_flags

    def known(self, flags: Tensor) -> Tensor | int:
        """Return 0 of a step alone, which nobody skips: nothing is copied to the host."""
        return 0 if flags is self._no_flags else flags

    def _step_alone(self, grads: Sequence[Tensor], agreed: Agreed, coef: Tensor) -> None:
        """Take a step of this worker's own, and keep what will be agreed on; of the first also ``_kept_now``."""
        raise NotImplementedError

    def _end_round(self, this: Any) -> None:
        """Begin the next round; whether ``this`` one was skipped ``_settle_round`` is told later."""
        self._unsettled.append((self.frame.steps.outcomes.attempts, this))
        self._local = self._tag = 0

    def _take_back_skipped(self) -> None:
        """Tell how rounds ended, as soon as all ranks know."""
        while self._unsettled and (skipped := self.frame.steps.outcomes.was_skipped(self._unsettled[0][0])) is not None:
            with self.frame.steps.whole("the end of a round"):
                self._settle_round(self._unsettled.pop(0)[1], skipped)

    def _settle_round(self, this: Any, skipped: bool) -> None:
        raise NotImplementedError

    def told(self, abort: bool, number: int | Tensor, missing: Sequence[int], **more: Any) -> Told:
        return super().told(abort, number, self._missed, **more)._replace(tag=self._mixed_tag())

    def _mixed_tag(self) -> int:
        """Return a hash of the hyper-parameters of all steps of this round so far, the present one included."""
        return (1_000_003 * self._tag + self.frame.coefficients.tag) & 0x7FFFFFFF

    @property
    def _may_rest(self) -> bool:
        """Tell whether a round may move some tensors nowhere, by a learning rate of 0.

        One on another device may be: the host does not wait to know.
        """
        rates = [group["lr"] for group in self.frame.hyper.taken]
        return any((isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) == 0.0 for lr in rates)

    def _leaving_out(self, coef: Tensor) -> Tensor:
        """Return the table of a rank that moves alone, and leaves tensors without a gradient as they are."""
        frame = self.frame
        if not frame.missing:
            return coef
        still = upload([i in frame.missing for i in range(len(frame.parameters))], torch.bool, frame.device)
        return frame.coefficients.still(coef, still)

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return this rank's error when all next meet: between two synchronisations nobody hears of it."""
        held = self._held_error or error
        self._held_error = held if self.phase == "local" else None
        return None if self.phase == "local" else held

    def resume(self, header: Mapping[str, Any]) -> None:
        super().resume(header)
        self.phase = header["phase"]

    def stats(self) -> dict[str, Any]:
        """Return what ``Compressing.stats`` does, and local_steps (done in this round)."""
        return super().stats() | {"local_steps": self._local}
