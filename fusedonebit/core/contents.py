"""All that an algorithm carries from step to step, with its parts: what checkpoints have, and ``stats`` tell of.

``state.saving.save`` lays it out in a checkpoint, ``state.loading.load`` takes it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..comm.agreement import sum_of_words
from ..triton_kernels import backend
from .algorithm import Algorithm
from .frame import COMPARED_EVERY, Frame
from .header import Fields, check_fields, is_compressed
from .part import Part
from .sharding import local
from .state_tensor import MASTER, RANK, StateTensor


class Contents:
    """What an algorithm and its parts carry, together.

    Args:
        algorithm: An optimizer's.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    @property
    def frame(self) -> Frame:
        """Return the optimizer's."""
        return self.algorithm.frame

    @property
    def parts(self) -> Sequence[Part]:
        """Return all parts."""
        return self.algorithm.all_parts

    # ---------------------------------------------------------------- what it is

    def kept(self, compressed: bool | None = None) -> list[StateTensor]:
        """Return all tensors that are kept, in this stage or in another, and those that are only declared."""
        compressed = self.algorithm.compressed if compressed is None else compressed
        of_masters: dict[str, Any] = {"of_rank": self.algorithm.traits.masters_of_rank, "holds_parameters": True}
        masters = StateTensor(MASTER, "element", self.frame.nothing, wanted=False, **of_masters)
        return [*(kept for part in self.parts for kept in part.state(compressed)), masters]

    def declared(self) -> dict[str, StateTensor]:
        """Return all tensors that checkpoints may have, by name; of two of a name one is wanted."""
        unwanted_first = sorted((*self.kept(False), *self.kept(True)), key=lambda kept: kept.wanted)
        return {kept.name: kept for kept in (*unwanted_first, RANK)}

    def fields(self) -> Fields:
        """Return all plain values that are kept, by key, with their rules."""
        return {key: field for part in self.parts for key, field in part.header_fields.items()}

    def values(self) -> dict[str, Any]:
        """Return all plain values that are kept, by key; may wait for the device."""
        begun = {"begun": True} if self.frame.steps.begun else {}  # a stage that is not entered again
        return begun | {key: value for part in self.parts for key, value in part.plain_state().items()}

    # ---------------------------------------------------------------- checkpoints

    def check_header(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if the algorithm can't go on from a checkpoint with this header."""
        algorithm, frame, own = self.algorithm, self.frame, self.frame.wrote(header)
        traits, sizes = algorithm.traits, (len(frame.parameters), len(frame.groups))
        check_fields(header, self.fields(), traits.phases, sizes, own)
        writer = header.get("algorithm", "one of torch.optim")
        if writer != frame.name and not traits.continues:
            raise ValueError(f"the checkpoint must be of {frame.name}, got {writer}")
        *others, leads = self.parts
        for part in (leads, *others):
            part.check_plain_state(header)
        if is_compressed(header):
            frame.check_layout(header)

    def load(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's stage and plain values, with all buffers that they need, still empty."""
        own, phase = self.frame.wrote(header), header["phase"]
        self.frame.steps.begun = own and header.get("begun", False)
        if phase in self.algorithm.traits.phases and (own or is_compressed(header)):
            self.algorithm.phase = phase
        for part in self.parts:
            part.resume(header)

    def loaded(self, header: Mapping[str, Any]) -> None:
        """Take note that the buffers are filled."""
        for part in self.parts:
            part.resumed(header)

    def settle(self) -> None:
        """Bring all tensors into the form in which they are saved."""
        *others, leads = self.parts
        for part in (leads, *others):
            part.settle(self.algorithm.compressed)

    # ---------------------------------------------------------------- what ranks have in common

    def compare(self) -> None:
        """Let ranks compare what they have in common when they next meet, once in so many steps (``Stage.digest``)."""
        algorithm, done = self.algorithm, self.frame.steps.count.total
        due = done // COMPARED_EVERY > max(0, done - algorithm.round_steps) // COMPARED_EVERY
        if due and algorithm.synchronised and (digest := algorithm.stage.digest) is not None:
            for tensor in self._in_common():
                digest.add_(sum_of_words(tensor))

    def _in_common(self) -> list[Tensor]:
        """Return what all ranks have alike between two synchronisations, to the bit, dense: see ``StateTensor``."""
        frame = self.frame
        plist = frame.parameters
        masters = [] if self.algorithm.traits.masters_of_rank else [plist.dense[i] for i in plist.masters]
        values = [local(p).detach() for p in plist.owners] + masters
        dense = [value.as_strided((value.numel(),), (1,)) for value in values]
        return [frame.steps.of_each, *dense, *(kept.tensor for kept in self.kept() if kept.in_common)]

    # ---------------------------------------------------------------- what users look at

    def report(self) -> dict[str, Any]:
        """Return what ``DistributedOptimizer.stats`` tells."""
        algorithm, frame = self.algorithm, self.frame
        algorithm.catch_up()
        transport, layout, inside = frame.ranks.transport, frame.layout, frame.ranks.inside
        found = {
            "phase": algorithm.phase,
            "step": frame.steps.outcomes.updates,
            "skipped_steps": frame.steps.outcomes.skipped,
            "partial_steps": frame.steps.outcomes.partial,
            "freeze_step": None,
            "local_steps": 0,
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
            "grad_norm": None if frame.options.max_grad_norm is None else float(frame.scaling.norm),
        }
        for part in self.parts:
            found |= part.stats()
        if algorithm.exchange is not None:
            scratch = [tensor for part in self.parts for tensor in part.scratch()]
            of_step = sum(tensor.nbytes for tensor in (*scratch, *frame.scaling.scratch()))
            found["wire_bytes"] = algorithm.exchange.reducer.wire_bytes + of_step
        return found

    def layer_stats(self) -> dict[str, list[Any]]:
        """Return what ``stats(layers=True)`` tells of layers: one entry per tensor each."""
        told: dict[str, list[Any]] = {"name": list(self.frame.parameters.called)}
        for part in self.parts:
            told |= part.layer_stats()
        return told

    def _state_bytes(self) -> int:
        """Return the bytes of all that the next step needs, tables included; each piece of memory counts once."""
        storages = {(memory := tensor.untyped_storage()).data_ptr(): memory.nbytes() for tensor in self._needed()}
        return sum(storages.values())

    def _needed(self) -> list[Tensor]:
        """Return what is declared, what else the next step needs of the last, and tables."""
        frame, plist = self.frame, self.frame.parameters
        declared = [kept.tensor for kept in (*self.kept(False), *self.kept(True)) if kept.wanted]
        held = [tensor for part in self.parts for tensor in part.held()]
        masters = [*(plist.dense[i] for i in plist.masters), *plist.corrections.loaded.values()]
        masters += [] if plist.corrections.table is None else [plist.corrections.table]
        counts = [frame.steps.updates, frame.steps.of_each, *frame.scaling.held()]
        return [*declared, *held, *masters, *counts, frame.places.block_tensor, *frame.live]
