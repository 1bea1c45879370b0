"""What an optimizer does in a step, and what it carries to the next; ``Frame`` is what it does that with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..comm.agreement import sum_of_words
from ..triton_kernels import Coef, backend
from .frame import COMPARED_EVERY, Frame
from .header import Fields, check_fields, is_compressed
from .part import Part
from .settings import Options
from .sharding import local
from .stage import Stage
from .state_tensor import MASTER, RANK, StateTensor

Phase = Literal["uncompressed", "warmup", "compression", "local", "one-bit"]


class Algorithm(Stage):
    """Skeleton of an algorithm: a subclass makes its parts, and says which stage takes the coming step.

    An algorithm of a single stage is that stage itself. It is made anew, and filled, where a checkpoint is loaded or a
    group is added.

    Args:
        frame: Of the optimizer.

    Attributes:
        phase: The name of the stage of the last step taken, or of the coming one once that was entered.
        parts: What else keeps something from step to step.
    """

    settings: ClassVar[type[Options]] = Options
    """The dataclass into which Numerics, Wire and Faults are merged; its other fields are arguments of constructors."""

    columns: ClassVar[dict[Coef, str]] = {}
    """Hyper-parameters of a group that go into the coefficient table as they are."""

    linear: ClassVar[bool] = False
    """Whether ONE_MINUS_BETA2 multiplies gradients, not their squares: it is negative then where one maximises."""

    phases: ClassVar[dict[Phase, bool]] = {"uncompressed": False}
    """The stages in which it can be, the first one first, and whether it keeps what is "compressed" then."""

    continues: ClassVar[bool] = True
    """Whether it can go on from checkpoints of other optimizers, torch's AdamW among them."""

    takes_shards: ClassVar[bool] = True
    """Whether parameters may be shards of tensors."""

    corrects: ClassVar[bool] = False
    """Whether all its ops that read parameters also take corrections of them, so that no float32 masters are needed."""

    masters_of_rank: ClassVar[bool] = False
    """Whether each rank has master weights of its own."""

    compresses: ClassVar[bool] = True
    """Whether less is sent than DDP would send."""

    parts: Sequence[Part] = ()

    @classmethod
    def check(cls, frame: Frame) -> None:
        """Raise ValueError if it can't work with these parameters and ranks, or as the options say."""
        frame.check_shards(cls.takes_shards)
        frame.check_16_bits(cls.corrects)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.phase: Phase = next(iter(self.phases))

    @property
    def stage(self) -> Stage:
        """Return what takes the coming step, once ``enter_stage`` was called: itself, where there are no others."""
        return self

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Take up what the constructor's ``arguments`` have brought from an earlier run; every rank calls it."""

    def close(self) -> None:
        """Give back hooks, and memory that another is about to take up in its place; it may still be asked to load.

        Memory of the parameters' size that it has allocated itself, which is most of it.
        """
        for part in self.parts:
            part.close()

    # ---------------------------------------------------------------- groups

    def check_group(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ValueError for a hyper-parameter of a group that can't be changed any more; ``where`` names it."""

    def check_growth(self) -> None:
        """Raise RuntimeError if no group can be added now."""

    def carried(self) -> Any:
        """Return what its successor's ``has_grown`` gets, besides what is kept of each parameter."""

    def has_grown(self, carried: Any) -> None:
        """Take over what the algorithm before has ``carried``, now that a group was added."""

    # ---------------------------------------------------------------- a step

    def check_step(self) -> None:
        """Raise RuntimeError, before anything is done, if no step can be taken now."""

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if ``what`` must not come between the backward pass and the step."""

    def check_captured(self) -> None:
        """Raise RuntimeError if the coming step can't be captured in a CUDA graph."""
        if not self.options.capturable or self.options.nonfinite == "raise":
            raise RuntimeError(
                'a step can only be captured in a CUDA graph with Wire(capturable=True) and Faults(nonfinite="skip"): '
                "what changes from step to step must lie on the device; construct the optimizer so"
            )
        if not self.stage.can_capture:
            raise RuntimeError(
                f"a step can only be captured in the compression stage, not in {self.phase!r}: take uncaptured steps "
                'until optimizer.phase == "compression"; several ranks of AdamW and Lamb have no such stage'
            )
        self.stage.check_capture()

    def enter_stage(self) -> bool:
        """Change the stage if it is time, alike on all ranks; ``steps.changing`` says so before anything is changed.

        Returns:
            Whether tensors lie elsewhere now, or mean something else.
        """
        return False

    def after_step(self) -> None:
        """Do what follows once a step was counted."""

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return the error that this step raises on this rank, if any; by now every rank has skipped it."""
        late, self.frame.late_error = self.frame.late_error, None
        return error or late

    def catch_up(self) -> None:
        """Wait until the host knows how all steps so far have ended; raises as ``step`` does."""
        self.frame.steps.outcomes.catch_up(self.stage.describe)

    # ---------------------------------------------------------------- what ranks have in common

    @property
    def synchronised(self) -> bool:
        """Return whether all ranks have the same parameters now."""
        return True

    @property
    def round_steps(self) -> int:
        """Return how many steps lie between the last synchronisation and the one before."""
        return 1

    def compare_state(self, digest: Tensor | None) -> None:
        """Let ranks compare what they have in common when they next meet, once in so many steps; see ``digest``."""
        if digest is None or not self.synchronised:
            return
        done = self.frame.steps.count.total
        if done // COMPARED_EVERY > max(0, done - self.round_steps) // COMPARED_EVERY:
            for tensor in self._in_common():
                digest.add_(sum_of_words(tensor))

    def _in_common(self) -> list[Tensor]:
        """Return what all ranks have alike between two synchronisations, to the bit, dense: see ``StateTensor``."""
        frame = self.frame
        plist = frame.parameters
        masters = [] if self.masters_of_rank else [plist.dense[i] for i in plist.masters]
        values = [local(p).detach() for p in plist.owners] + masters
        dense = [value.as_strided((value.numel(),), (1,)) for value in values]
        return [frame.steps.of_each, *dense, *(kept.tensor for kept in self.kept() if kept.in_common)]

    # ---------------------------------------------------------------- what it keeps, with its parts

    @property
    def compressed(self) -> bool:
        """Return whether it keeps what is declared for the "compressed" stage."""
        return self.phases.get(self.phase, False)

    def kept(self, compressed: bool | None = None) -> list[StateTensor]:
        """Return all tensors that it keeps, in this stage or in another, and those that it only declares."""
        compressed = self.compressed if compressed is None else compressed
        of_masters: dict[str, Any] = {"of_rank": self.masters_of_rank, "holds_parameters": True}
        masters = StateTensor(MASTER, "element", self.frame.nothing, wanted=False, **of_masters)
        return [*(kept for part in (*self.parts, self) for kept in part.state(compressed)), masters]

    def declared(self) -> dict[str, StateTensor]:
        """Return all tensors that its checkpoints may have, by name; of two of a name one is wanted."""
        unwanted_first = sorted((*self.kept(False), *self.kept(True)), key=lambda kept: kept.wanted)
        return {kept.name: kept for kept in (*unwanted_first, RANK)}

    def fields(self) -> Fields:
        """Return all plain values that it keeps, by key, with their rules."""
        return {key: field for part in (*self.parts, self) for key, field in part.header_fields.items()}

    def values(self) -> dict[str, Any]:
        """Return all plain values that it keeps, by key; may wait for the device."""
        begun = {"begun": True} if self.frame.steps.begun else {}  # a stage that is not entered again
        return begun | {key: value for part in (*self.parts, self) for key, value in part.plain_state().items()}

    def check_header(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if it can't go on from a checkpoint with this header."""
        frame, own = self.frame, self.frame.wrote(header)
        check_fields(header, self.fields(), self.phases, (len(frame.parameters), len(frame.groups)), own)
        writer = header.get("algorithm", "one of torch.optim")
        if writer != frame.name and not self.continues:
            raise ValueError(f"the checkpoint must be of {frame.name}, got {writer}")
        for part in (self, *self.parts):
            part.check_plain_state(header)
        if is_compressed(header):
            frame.check_layout(header)

    def load(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's stage and plain values, with all buffers that it needs, still empty."""
        self.frame.steps.begun = self.frame.wrote(header) and header.get("begun", False)
        for part in (*self.parts, self):
            part.resume(header)

    def loaded(self, header: Mapping[str, Any]) -> None:
        """Take note that the buffers are filled."""
        for part in (*self.parts, self):
            part.resumed(header)

    def prepare_to_save(self) -> None:
        """Bring all tensors that it keeps into the form in which they are saved."""
        for part in (self, *self.parts):
            part.settle()

    # ---------------------------------------------------------------- what users look at

    def report(self) -> dict[str, Any]:
        """Return what ``DistributedOptimizer.stats`` tells."""
        self.catch_up()
        frame = self.frame
        transport, layout, inside = frame.ranks.transport, frame.layout, frame.ranks.inside
        found = {
            "phase": self.phase,
            "step": frame.steps.outcomes.updates,
            "skipped_steps": frame.steps.outcomes.skipped,
            "partial_steps": frame.steps.outcomes.partial,
            "freeze_step": None,
            "backend": backend(frame.device),
            "transport": repr(transport),
            "world_size": transport.world_size,
            "parameters": layout.real_numel,
            "padding": layout.numel - layout.real_numel,
            "collectives_step": transport.traffic.collectives_step,
            "bytes_step": transport.traffic.bytes_step,
            "bytes_total": transport.traffic.bytes_total,
            "averaged_already": bool(frame.under_ddp.elsewhere),
            "collectives_inside": inside.traffic.collectives_step,
            "bytes_inside": inside.traffic.bytes_step,
            # Of a ring all-reduce of float32 gradients.
            "bytes_fp32": 2 * 4 * layout.real_numel * (transport.world_size - 1) // transport.world_size,
            "state_bytes": self._state_bytes(),
            "grad_norm": None if self.options.max_grad_norm is None else float(frame.scaling.norm),
        }
        for part in (*self.parts, self):
            found |= part.stats()
        if self.exchange is not None:
            scratch = [tensor for part in (*self.parts, self) for tensor in part.scratch()]
            of_step = sum(tensor.nbytes for tensor in (*scratch, *frame.scaling.scratch()))
            found["wire_bytes"] = self.exchange.reducer.wire_bytes + of_step
        return found

    def _state_bytes(self) -> int:
        """Return the bytes of all that the next step needs, tables included; each piece of memory counts once."""
        storages = {(memory := tensor.untyped_storage()).data_ptr(): memory.nbytes() for tensor in self._needed()}
        return sum(storages.values())

    def _needed(self) -> list[Tensor]:
        """Return what is declared, what else the next step needs of the last, and tables."""
        frame, plist = self.frame, self.frame.parameters
        declared = [kept.tensor for kept in (*self.kept(False), *self.kept(True)) if kept.wanted]
        held = [tensor for part in (*self.parts, self) for tensor in part.held()]
        masters = [*(plist.dense[i] for i in plist.masters), *plist.loaded()]
        masters += [] if plist.correction is None else [plist.correction]
        counts = [frame.steps.updates, frame.steps.of_each, *frame.scaling.held()]
        return [*declared, *held, *masters, *counts, frame.places.block_tensor, *frame.live]

    def layer_stats(self) -> dict[str, list[Any]]:
        """Return what ``stats(layers=True)`` tells of layers: one entry per tensor each."""
        return {"name": list(self.frame.parameters.called)}

    def owed(self) -> float:
        """Return the norm of what compression has left out so far, over that of the last update; waits for the device.

        0 where nothing is left out; infinite where there was no update to compare with, as after a skipped step.
        """
        return 0.0 if self.exchange is None else self.exchange.owed()

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape; see ``DistributedOptimizer.momentum``."""
        return self.value_of("exp_avg", self.frame.index(param)).to(torch.float32, copy=True)

    def value_of(self, name: str, i: int) -> Tensor:
        """Return what is kept of parameter ``i`` under a name, of its shape: a view, or a float32 copy of codes."""
        (kept,) = (kept for kept in self.kept() if kept.name == name and kept.wanted)
        return kept.part(self.frame, i)

    def described(self) -> list[str]:
        """Return lines for ``repr``: what it alone can be told."""
        own = [name for name in self.options.recorded if name not in Options.recorded]
        return [f"{name}: {getattr(self.options, name)}" for name in own]
