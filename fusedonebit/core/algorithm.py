"""What an optimizer does in a step, and what it carries to the next; ``Frame`` is what it does that with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..comm import Flag, Transport
from ..comm.agreement import sum_of_words
from ..triton_kernels import Coef, backend
from .frame import COMPARED_EVERY, Frame
from .header import Fields
from .options import Made
from .scaling import NO_SCALE, Agreed
from .settings import Options
from .sharding import local
from .spec import Specs, StateSpec

Phase = Literal["uncompressed", "warmup", "compression", "local", "one-bit"]


class Algorithm:
    """Skeleton of an algorithm: a subclass says with ``exchange`` what ranks do with each other's gradients.

    It declares the tensors (``kept``, see ``StateSpec``) and plain values (``header_fields``) that it carries from step
    to step; allocation, saving and loading follow from that. One is made anew, and filled, where a checkpoint is loaded
    or a group is added.

    Args:
        frame: Of the optimizer.

    Attributes:
        options: The frame's.
        phase: The stage of the last step taken.
    """

    settings: ClassVar[type[Options]] = Options
    """What the option objects are settled into; its other fields are further ``settings`` of the constructor."""

    columns: ClassVar[dict[Coef, str]] = {}
    """Hyper-parameters of a group that go into the coefficient table as they are."""

    linear: ClassVar[bool] = False
    """Whether ONE_MINUS_BETA2 multiplies gradients, not their squares: it is negative then where one maximises."""

    kept: ClassVar[Specs] = ()
    """What it keeps as tensors, besides the parameters' ``step`` and ``master``."""

    header_fields: ClassVar[Fields] = {}
    """What it keeps as plain values, in the header of its checkpoints."""

    phases: ClassVar[dict[Phase, bool]] = {"uncompressed": False}
    """The stages in which it can be, the first one first, and whether it keeps what is "compressed" then."""

    continues: ClassVar[bool] = True
    """Whether it can go on from checkpoints of other optimizers, torch's AdamW among them."""

    takes_shards: ClassVar[bool] = True
    """Whether parameters may be shards of tensors."""

    corrects: ClassVar[bool] = False
    """Whether all its ops that read parameters take corrections, so that these may be all that is kept of masters."""

    masters_of_rank: ClassVar[bool] = False
    """Whether each rank has master weights of its own."""

    compresses: ClassVar[bool] = True
    """Whether less is sent than DDP would send."""

    weighs: ClassVar[int] = 1
    """How many columns of coefficients weigh gradients, see ``scale_coefficients``."""

    options: Options
    exp_avg: Tensor

    @classmethod
    def check(cls, frame: Frame) -> None:
        """Raise ValueError if it can't work with these parameters and ranks, or as the options say."""
        frame.check_shards(cls.takes_shards)
        frame.check_16_bits(cls.corrects)

    def __init__(self, frame: Frame) -> None:
        self.frame, self.options = frame, frame.options
        self.phase: Phase = next(iter(self.phases))
        for spec in self.kept:
            spec.allocate(self, frame.layout, frame.device)

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Take up what the constructor's ``arguments`` have brought from an earlier run; every rank calls it."""

    def close(self) -> None:
        """Give back hooks, and memory that another is about to take up in its place; it may still be asked to load.

        Memory of the parameters' size that it has allocated itself, which is most of it.
        """
        for spec in self.kept:
            if spec.per == "element" and spec.at in vars(self):
                setattr(self, spec.at, spec.tensor(self).new_empty(0))

    # ---------------------------------------------------------------- groups

    def check_group(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ValueError for a hyper-parameter of a group that can't be changed any more; ``where`` names it."""

    def check_growth(self) -> None:
        """Raise RuntimeError if no group can be added now."""
        if self.phase == "compression":
            raise RuntimeError(
                "add_param_group must be called before the freeze: the layout is fixed in the compression stage; "
                "construct a new optimizer"
            )

    def carried(self) -> Any:
        """Return what ``has_grown`` of the algorithm after it needs, besides what is kept of each parameter."""

    def has_grown(self, carried: Any) -> None:
        """Take over what the algorithm before has ``carried``, now that a group was added."""

    # ---------------------------------------------------------------- a step

    def check_step(self) -> None:
        """Raise RuntimeError, before anything is done, if no step can be taken now."""

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if ``what`` must not come between the backward pass and the step."""

    def check_repeated(self, repeated: bool) -> None:
        """Raise RuntimeError if a step that this rank repeats can't tell the others of it."""

    def check_capture(self) -> None:
        """Raise RuntimeError if the coming step can't be captured in a CUDA graph."""
        if not self.options.capturable or self.options.nonfinite == "raise":
            raise RuntimeError(
                'a step can only be captured in a CUDA graph with Wire(capturable=True) and Faults(nonfinite="skip"): '
                "what changes from step to step must lie on the device; construct the optimizer so"
            )
        if not self.can_capture:
            raise RuntimeError(
                f"a step can only be captured in the compression stage, not in {self.phase!r}: take uncaptured steps "
                'until optimizer.phase == "compression"; several ranks of AdamW and Lamb have no such stage'
            )

    def drop_averages(self) -> None:
        """Throw away, on all ranks or on none, what DDP has averaged; ``zero_grad`` drops the gradients."""

    @property
    def can_capture(self) -> bool:
        """Tell whether the coming step could be captured in a CUDA graph."""
        return self.phase == "compression"

    def enter_phase(self) -> bool:
        """Change the stage if it is time, alike on all ranks; ``steps.changing`` says so before anything is changed.

        Returns:
            Whether tensors lie elsewhere now, or mean something else.
        """
        return False

    def coefficient_table(self) -> Tensor:
        """Return the coefficients of the coming step, float32 [tensors, columns of ``Coef``]."""
        frame = self.frame
        return frame.coefficients(frame.hyper.taken, Made(frame.steps.of_each))

    @property
    def renews_on_the_way(self) -> bool:
        """Tell whether the coming step renews the table of coefficients, and counts, in other launches' stead."""
        return False

    def exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Exchange with the other ranks and update; return the step's flags, int32 [1]."""
        raise NotImplementedError

    def agree(self, grads: Sequence[Tensor], coef: Tensor, transport: Transport, **how: Any) -> Agreed:
        """Agree on what gradients are multiplied with, and on holding still, and note it; ``how``: see ``Scaling``."""
        frame, scale = self.frame, self.frame.loss_scale
        if scale is NO_SCALE and self.options.max_grad_norm is None:
            return Agreed(coef)
        which = scale, self.options.max_grad_norm, transport, frame.ranks.model, self.weighs
        return frame.scaling.agree(grads, coef, *which, **how)

    def known(self, flags: Tensor) -> Tensor | int:
        """Return the step's flags, or their value where the host knows it."""
        return flags

    def after_step(self) -> None:
        """Do what follows once a step was counted."""

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return what this step raises, if this rank had an error: all ranks know of it now."""
        late, self.frame.late_error = self.frame.late_error, None
        return error or late

    def catch_up(self) -> None:
        """Wait until the host knows how all steps so far have ended; raises as ``step`` does."""
        self.frame.steps.outcomes.catch_up(self.describe)

    def describe(self, flag: Flag) -> str:
        """Return details of why a step was skipped."""
        raise NotImplementedError

    # ---------------------------------------------------------------- what ranks have in common

    @property
    def digest(self) -> Tensor | None:
        """Return checksums of what all ranks have received alike, which they compare when they next meet: int64 [n].

        None where nobody does.
        """
        raise NotImplementedError

    @property
    def averages_gradients(self) -> bool:
        """Tell whether the coming step uses averages of the ranks' gradients; else DDP must leave them alone."""
        return not self.compressed

    @property
    def synchronised(self) -> bool:
        """Return whether all ranks have the same parameters now."""
        return True

    @property
    def round_steps(self) -> int:
        """Return how many steps lie between the last synchronisation and the one before."""
        return 1

    def compare_state(self) -> None:
        """Let ranks compare what they have in common when they next meet, once in so many steps."""
        frame = self.frame
        steps, digest = frame.steps, self.digest
        if steps.captured or frame.ranks.transport.world_size == 1 or digest is None or not self.synchronised:
            return
        done = steps.count.total
        if done // COMPARED_EVERY > max(0, done - self.round_steps) // COMPARED_EVERY:
            for tensor in self._in_common():
                digest.add_(sum_of_words(tensor))

    def _in_common(self) -> list[Tensor]:
        """Return what all ranks have alike between two synchronisations, to the bit, dense: see ``StateSpec``."""
        frame = self.frame
        kept = [spec for spec in self.kept if spec.in_common and spec.applies(self, self.compressed)]
        plist = frame.parameters
        masters = [] if self.masters_of_rank else [plist.dense[i] for i in plist.masters]
        values = [local(p).detach() for p in plist.owners] + masters
        dense = [value.as_strided((value.numel(),), (1,)) for value in values]
        return [frame.steps.of_each, *dense, *(spec.tensor(self) for spec in kept)]

    # ---------------------------------------------------------------- what it keeps

    @property
    def compressed(self) -> bool:
        """Return whether it keeps what is declared for the "compressed" stage."""
        return self.phases.get(self.phase, False)

    def specs(self, compressed: bool | None = None) -> list[StateSpec]:
        """Return the declarations that apply, in this stage or in another."""
        compressed = self.compressed if compressed is None else compressed
        return [spec for spec in self.kept if spec.applies(self, compressed)]

    def part_of(self, spec: StateSpec, i: int) -> Tensor:
        """Return what is kept of parameter ``i``'s elements, of its shape: where it is kept, but for codes.

        Of a part or a chunk of the flat index space, all that is here.
        """
        kept, frame = spec.tensor(self), self.frame
        return frame.parameters.shaped(kept, i, frame.layout.offset(i)) if spec.per == "element" else kept

    def keep_part(self, spec: StateSpec, i: int, part: Tensor) -> None:
        """Keep ``part``, which is what ``part_of`` has returned, and was filled."""

    def settle(self) -> None:
        """Bring what is kept into the form in which it is saved."""

    def plain_state(self) -> dict[str, Any]:
        """Return the values of ``header_fields``."""
        found = {key: attrgetter(field.at)(self) for key, field in self.header_fields.items() if field.at}
        return found | ({"begun": True} if self.frame.steps.begun else {})  # a stage that is not entered again

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's stage can't be taken up."""

    def resume(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's stage, with all buffers that it needs, still empty; also its ``header_fields``."""
        frame = self.frame
        for key, field in self.header_fields.items():
            if field.at and key in header:
                *parts, name = field.at.split(".")
                setattr(attrgetter(".".join(parts))(self) if parts else self, name, header[key])
        frame.steps.begun = frame.wrote(header) and header.get("begun", False)

    def resumed(self, header: Mapping[str, Any]) -> None:
        """Take note that the buffers are filled."""

    # ---------------------------------------------------------------- what users look at

    def stats(self) -> dict[str, Any]:
        """Return what ``DistributedOptimizer.stats`` tells of every optimizer."""
        self.catch_up()
        frame = self.frame
        transport, layout, inside = frame.ranks.transport, frame.layout, frame.ranks.inside
        return {
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

    def _state_bytes(self) -> int:
        """Return the bytes of all that the next step needs, tables included; each piece of memory counts once."""
        storages = {(memory := tensor.untyped_storage()).data_ptr(): memory.nbytes() for tensor in self.held()}
        return sum(storages.values())

    def held(self) -> list[Tensor]:
        """Return what is declared, what else the next step needs of the last, and tables."""
        declared = [spec.tensor(self) for spec in self.kept if spec.wanted(self)]
        frame, plist = self.frame, self.frame.parameters
        masters = [*(plist.dense[i] for i in plist.masters), *plist.loaded()]
        masters += [] if plist.correction is None else [plist.correction]
        counts = [frame.steps.updates, frame.steps.of_each, *frame.scaling.held()]
        return [*declared, *masters, *counts, frame.places.block_tensor, *frame.live]

    def scratch(self) -> list[Tensor]:
        """Return what only serves within a step, besides a reducer's."""
        return []

    def layer_stats(self) -> dict[str, list[Any]]:
        """Return what ``stats(layers=True)`` tells of layers: one entry per tensor each."""
        return {"name": list(self.frame.parameters.called)}

    def owed(self) -> float:
        """Return the norm of what compression has left out so far, over that of the last update; waits for the device.

        0 where nothing is left out; infinite where there was no update to compare with, as after a skipped step.
        """
        return 0.0

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape; see ``DistributedOptimizer.momentum``."""
        i = self.frame.index(param)
        (spec,) = (spec for spec in self.kept if spec.name == "exp_avg")
        return self.part_of(spec, i).to(torch.float32, copy=True)

    def described(self) -> list[str]:
        """Return lines for ``repr``: what it alone can be told."""
        own = [name for name in self.options.told if name not in Options.told]
        return [f"{name}: {getattr(self.options, name)}" for name in own]
