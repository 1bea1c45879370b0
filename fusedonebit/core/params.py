"""The user's parameters and gradients: what they must be, and how the ops reach them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm import Transport, checksum
from ..comm.agreement import Fact
from ..triton_kernels import FlatLayout
from ..triton_kernels.tables import Facts, Listed, Pattern
from .corrections import Corrections, lacking
from .options import averaged
from .param_checks import SUPPORTED_DTYPES, check_parameter, is_dense, refuse_gradient
from .sharding import is_dtensor, like, local, replicas, shard_mesh

ALL = slice(None)
# For ``map``, whose loop is not Python's.
_GRAD, _REQUIRES_GRAD = map(operator.attrgetter, ("grad", "requires_grad"))


class ParameterList:
    """The trainable parameters of all groups, in order, as the ops want them.

    Parameters stay where they are; of a DTensor only this rank's shard is looked at. One whose elements do not fill a
    contiguous piece of memory (a strided view) has a dense copy, which is written back after each update; so has, with
    master weights, one of 16 bits: a copy in float32, which then is the truth. Or one of bfloat16 has a correction,
    which ops read and write: what it lacks of such a copy.

    Args:
        groups: As of an optimizer.
        kept_in: As of ``Formats.parameters``.
        split_over: Connects the ranks over which tensors of the model are cut; None: none is.

    Raises:
        TypeError, ValueError: for parameters that can't be optimised; the message says which.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        kept_in: torch.dtype | None = None,
        split_over: Transport | None = None,
    ) -> None:
        self.owners: list[Tensor] = []  # those that require gradients, as given
        self.frozen: list[Tensor] = []  # those that did not when the optimizer was made
        self.frozen_names: list[str] = []
        self.group_of: list[int] = []
        self.index_of: list[int] = []  # of each among all parameters of all groups, as in a ``state_dict``
        self.names: list[str] = []  # "parameter 3", and its name where the user gave one; ranks compare by them
        first = [0, *itertools.accumulate(len(group["params"]) for group in groups)]
        seen: set[int] = set()
        # Those that are averaged as they are lie behind all others.
        for number, group in sorted(enumerate(groups), key=lambda each: averaged(each[1])):
            for index, p in enumerate(group["params"], first[number]):
                position = index - first[number]
                if id(p) in seen:  # torch has warned of it; it is one parameter
                    continue
                seen.add(id(p))
                given = group["param_names"][position] if "param_names" in group else None
                name = f"parameter {index}" + (f" ({given})" if given else "")
                check_parameter(p, name)
                if p.requires_grad:
                    self.owners.append(p)
                    self.group_of.append(number)
                    self.index_of.append(index)
                    self.names.append(name)
                else:
                    self.frozen.append(p)
                    self.frozen_names.append(name)
        self.called = list(self.names)  # in messages
        self.mesh = shard_mesh(self.owners, self.names, split_over is not None)
        self.params = [local(p) for p in self.owners]  # what this rank holds of each
        # Those that all model-parallel ranks have alike.
        self.replicas = replicas(self.owners, self.names, split_over)
        self._check_together()
        self.sizes = tuple(p.numel() for p in self.params)
        # What the ops write: the parameters themselves, or their dense copies.
        self.dense = [p if is_dense(p) else p.detach().contiguous() for p in self.params]
        whole = kept_in is torch.float32
        self.masters = [i for i, p in enumerate(self.params) if whole and p.dtype != torch.float32]
        narrow = None if whole else kept_in
        corrected = [i for i, p in enumerate(self.params) if narrow and p.dtype == torch.bfloat16]
        self.corrections = Corrections(corrected, narrow)
        for i in self.masters:
            self.dense[i] = self.dense[i].detach().float()
        self._staged = [i for i, p in enumerate(self.params) if self.dense[i] is not p and i not in set(self.masters)]
        self._targets: Sequence[Tensor] = self.params
        self._seen = self._versions()
        self._strides = [d.stride() for d in self.dense]
        self._pointers = [p.data_ptr() for p in self.params]
        self._kinds = [(p.dtype, p.device, p.shape, p.stride()) for p in self.params]
        # Parameters and gradients as they were found usable, and where those and ``dense`` lay.
        self._of_owners, self._of_gradients = Pattern(), Pattern()
        self._gradient_facts: Facts | None = None
        self._dense_facts: Facts | None = None

    def __len__(self) -> int:
        return len(self.params)

    def name(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take the names of a module's parameters for messages, where the user gave none."""
        given = {id(p): f" ({name})" for name, p in named}
        for called, params in ((self.called, self.owners), (self.frozen_names, self.frozen)):
            called[:] = [
                name if name.endswith(")") else name + given.get(id(p), "")
                for name, p in zip(called, params, strict=True)
            ]

    def _check_together(self) -> None:
        devices = {p.device: name for p, name in zip(self.params, self.names, strict=True)}
        if len(devices) > 1:
            listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise ValueError(
                f"params must lie on one device, got {listed}; use one optimizer per device, each with its group"
            )
        ends = sorted(
            (p.data_ptr(), p.data_ptr() + p.nbytes, name)
            for p, name in zip(self.params, self.names, strict=True)
            if p.numel() and is_dense(p)
        )
        for (_, end, first), (start, _, second) in itertools.pairwise(ends):
            if start < end:
                raise ValueError(
                    f"params must not share memory, but {first} and {second} do; "
                    "tie weights by assigning the same Parameter to both modules"
                )

    def gradients(self, nothing: Tensor) -> list[Tensor]:
        """Return the gradients as they are, ``nothing`` where there is none; a compiler can follow it."""
        if self.mesh is not None:
            return [nothing if p.grad is None else local(p.grad) for p in self.owners]
        if torch.compiler.is_compiling():
            return [nothing if p.grad is None else p.grad for p in self.params]
        # ``map``, whose loop is not Python's.
        grads = list(map(_GRAD, self.params))
        return [nothing if g is None else g for g in grads] if type(None) in set(map(type, grads)) else grads

    def gradient(self, i: int, nothing: Tensor) -> Tensor:
        """Return that of parameter ``i`` alone; see ``gradients``."""
        grad = self.owners[i].grad
        return nothing if grad is None else local(grad)

    def missing(self, given: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the indices of parameters without a gradient in ``given``, which ``gradients`` has returned."""
        if all(given.facts.numels if isinstance(given, Listed) else map(Tensor.numel, given)):
            return ()
        empty = (i for i, g in enumerate(given) if not g.numel())
        # Of an empty parameter, or shard, that of no elements is one.
        return tuple(i for i in empty if self.sizes[i] or self.owners[i].grad is None)

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Return whether ``usable`` would leave ``given`` as it is; a compiler follows it, and guards what it saw."""
        if not self._unchanged():
            return False
        if not all(p.requires_grad for p in self.owners):
            return False
        for p, g in zip(self.params, given, strict=True):
            if g.numel() and (g.dtype not in SUPPORTED_DTYPES or g.shape != p.shape or g.stride() != p.stride()):
                return False
        return not self._staged and not any(p.requires_grad for p in self.frozen)

    def _unchanged(self) -> bool:
        # A compiler looks once: tensors that change later it finds by itself.
        try:
            self._check_unchanged()
        except RuntimeError:
            return False
        return True

    _unchanged._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result's

    def usable(self, given: Sequence[Tensor], nothing: Tensor, checked: bool = False) -> Listed:
        """Check parameters, unless ``checked``, and what ``gradients`` has returned; bring that into ``dense``'s order.

        Raises:
            RuntimeError: if a parameter was moved or cast since construction, or requires gradients only since then.
            TypeError, ValueError: if a gradient can't be used.
        """
        if not (checked or self._as_before()):
            self._check_unchanged()
        if not self._of_gradients.fits(given, nothing):
            return self._each_usable(given, nothing)
        listed = Listed.of(given, self._gradient_facts)
        if listed.facts is not self._gradient_facts and not all(listed.facts.found):  # others may be missing
            return self._each_usable(given, nothing)
        self._gradient_facts = listed.facts
        return listed

    def _each_usable(self, given: Sequence[Tensor], nothing: Tensor) -> Listed:
        """Check gradients one after the other, as ``usable`` says; remember what they are like if none was changed."""
        grads = [self._usable(i, g, nothing) for i, g in enumerate(given)]
        listed = Listed.of(grads)
        if all(map(operator.is_, grads, given)):
            self._of_gradients.take([g for g in grads if g is not nothing])
            self._gradient_facts = listed.facts
        return listed

    def usable_of(self, members: slice, nothing: Tensor) -> Listed:
        """Check the gradients that some parameters have now, as ``usable`` says."""
        self._check_unchanged()
        which = range(len(self))[members]
        return Listed.of([self._usable(i, self.gradient(i, nothing), nothing) for i in which])

    def _usable(self, i: int, g: Tensor, nothing: Tensor) -> Tensor:
        """Return the gradient of parameter ``i``, in the memory order of ``dense``, if it can be used."""
        p = self.params[i]
        if g.numel() == 0:
            return nothing
        strange = g.layout is not torch.strided or g.shape != p.shape or g.device != p.device
        if strange or g.dtype not in SUPPORTED_DTYPES:
            refuse_gradient(g, p, self.called[i])
        if not g.data_ptr():
            raise RuntimeError(f"the gradient of {self.called[i]} has no memory: its storage was freed or resized")
        if g.stride() == self._strides[i]:
            return g
        return torch.empty_strided(p.shape, self._strides[i], dtype=g.dtype, device=g.device).copy_(g)

    def _as_before(self) -> bool:
        """Return whether all parameters lie where they did, and the same ones train."""
        if self.mesh is not None:
            return False
        with torch.enable_grad():  # else a pattern leaves out whether they require any
            if not self._of_owners.fits(self.owners):
                return False
        return list(map(Tensor.data_ptr, self.owners)) == self._pointers and not any(map(_REQUIRES_GRAD, self.frozen))

    def _check_unchanged(self) -> None:
        if self._as_before():
            return
        for i, owner in enumerate(self.owners):
            p = self._current(i, owner)
            if p.data_ptr() != self._pointers[i] or p.stride() != self._kinds[i][3]:
                kind = (p.dtype, p.device, p.shape, p.stride())
                if kind != self._kinds[i]:
                    was, now = (f"{k[0]} {tuple(k[2])} on {k[1]}" for k in (self._kinds[i], kind))
                    raise RuntimeError(
                        f"{self.called[i]} was {was} when the optimizer was made, but now is {now}; "
                        "move or cast the model first, then construct the optimizer"
                    )
                if not p.data_ptr() and p.numel():
                    raise RuntimeError(
                        f"{self.called[i]} has no memory: its storage was freed or resized; "
                        "step while the parameters are gathered, or use FSDP2, whose shards stay"
                    )
                # The same tensor in other memory: the dense alias is the parameter, nothing to do.
                self._pointers[i] = p.data_ptr()
        for p, name in zip(self.frozen, self.frozen_names, strict=True):
            if p.requires_grad:
                raise RuntimeError(
                    f"{name} requires gradients now but did not when the optimizer was made, and so has no state; make "
                    "the optimizer first, then freeze layers (DDP: make it with find_unused_parameters=True, attach, "
                    "then freeze): one without a gradient stays as it is, and trains again once it has one"
                )
        if self.mesh is None:
            with torch.enable_grad():
                self._of_owners.take(self.owners)

    def _current(self, i: int, owner: Tensor) -> Tensor:
        """Return what this rank holds of parameter ``i`` now; a DTensor may have been given another shard."""
        if self.mesh is None:
            return owner
        before, now = self.params[i], local(owner)
        if now.data_ptr() != before.data_ptr() or now.shape != before.shape:
            self.params[i] = now
            if self.dense[i] is before:
                self.dense[i] = now
        return now

    @contextmanager
    def standing_in(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Update ``tensors`` instead of the parameters: a compiler's stand-ins, which may be the same or copies."""
        dense, staged = self.dense, self._staged
        if tensors is self.params or all(map(operator.is_, tensors, self.params)):
            try:
                self.dense = listed = self._listed(tensors is self.params)
                self._dense_facts = listed.facts
                yield
            finally:
                self.dense = dense
            return
        own = [d is p for d, p in zip(dense, self.params, strict=True)]
        in_place = [t.stride() == strides for t, strides in zip(tensors, self._strides, strict=True)]
        try:
            self.dense = [
                (t if ok else d.detach().clone()) if o else d
                for t, d, o, ok in zip(tensors, dense, own, in_place, strict=True)
            ]
            self._staged = [*staged, *(i for i, (o, ok) in enumerate(zip(own, in_place, strict=True)) if o and not ok)]
            self._targets = tensors
            yield
        finally:
            self.dense, self._staged, self._targets = dense, staged, self.params

    def _listed(self, checked: bool) -> Listed:
        """Return ``dense`` with what is known of it, and of the parameters, where those have just been ``checked``."""
        known = self._dense_facts
        own = known is not None and not self._staged and not self.masters and tuple(self._pointers) == known.found
        if known is not None and own and checked:
            return Listed(self.dense, known)
        return Listed.of(self.dense, known)

    def before_update(self) -> None:
        """Bring the dense copies up to date."""
        for i in self._staged:
            self.dense[i].copy_(self._targets[i])
        if self.corrections.loaded or self.masters:
            self.refresh_masters()

    def _versions(self) -> list[tuple[int, int]]:
        """Return what changes when somebody writes into a 16-bit parameter, or gives it other memory."""
        return [(self.params[i]._version, self.params[i].data_ptr()) for i in self.masters]

    def lay_out(self, layout: FlatLayout) -> None:
        """Make room for corrections, where there are any."""
        if self.corrections.which:
            self.corrections.lay_out(layout, self.params[0].device)

    @property
    def with_masters(self) -> Sequence[int]:
        """Return the parameters of which more is kept than they are."""
        return self.masters or self.corrections.which

    def master(self, i: int) -> Tensor:
        """Return the float32 master of parameter ``i``: where it is kept, or a copy of what it is by its correction."""
        if i in self.masters:
            return self.dense[i]
        loaded = self.corrections.loaded
        return loaded[i] if i in loaded else self.corrections.master(i, self._targets[i].detach(), self.dense[i])

    def load_master(self, i: int, saved: Tensor | None) -> None:
        """Fill the master of parameter ``i``; with the parameter's values where none was saved.

        The parameter may be loaded before or after: by the next update it is looked at once more.
        """
        if i in self.masters:
            self.dense[i].copy_(self.params[i].detach() if saved is None else saved)
            self._seen = []
        elif saved is None:
            self.corrections.loaded.pop(i, None)
            self.corrections.of(i, self.dense[i]).zero_()
        else:
            self.corrections.loaded[i] = self.params[i].detach().float().copy_(saved)

    def refresh_masters(self) -> None:
        """Take over what somebody has written into the 16-bit parameters; where they say the same, masters stay."""
        self.corrections.take_up(self._targets, self.dense)
        if not self.masters or self._seen == self._versions():
            return
        for i in self.masters:
            self.dense[i].copy_(self._refreshed(i))
        self._seen = self._versions()

    def after_update(self, members: slice = ALL) -> None:
        """Write the dense copies back, those of some parameters."""
        if not (self._staged or self.masters):
            return
        which = range(len(self))[members]
        for i in self._staged:
            if i in which:
                self._targets[i].copy_(self.dense[i])
        masters = [i for i in self.masters if i in which]
        if masters:
            torch._foreach_copy_([self._targets[i] for i in masters], [self.dense[i] for i in masters])
            self._seen = self._versions()

    def shaped(self, flat: Tensor, i: int, offset: int) -> Tensor:
        """Return the elements of parameter ``i`` in a flat tensor, as a view of its shape and strides."""
        part = flat[offset : offset + self.sizes[i]]
        return part.as_strided(self.dense[i].shape, self._strides[i])

    def published(self, part: Tensor, i: int) -> Tensor:
        """Return ``part``, of parameter ``i``'s shape here, distributed as the parameter is."""
        return like(self.owners[i], part)

    def largest_shard(self, i: int) -> tuple[int, ...]:
        """Return the shape of the largest shard of parameter ``i``, or its own where that is whole."""
        owner, here = self.owners[i], tuple(self.params[i].shape)
        if not is_dtensor(owner) or not owner.placements[0].is_shard(0):
            return here
        return (-(-owner.shape[0] // owner.device_mesh.size()), *here[1:])

    def strides(self) -> list[list[int]]:
        """Return the strides of each parameter's memory order, for checkpoints."""
        return [list(stride) for stride in (self._strides if self.mesh is None else [p.stride() for p in self.owners])]

    def facts(self) -> list[Fact]:
        """Return what must be equal on all ranks: count, dtypes, shapes and memory order."""
        described = [
            (name, f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)} in memory order {stride}")
            for p, name, stride in zip(self.params, self.names, self._strides, strict=True)
        ]
        return [("the number of trainable parameters", str(len(self))), *described]

    def values(self, which: Iterable[int] | None = None) -> list[Fact]:
        """Return checksums of what the next update begins from, which must be equal on all ranks; change nothing."""
        which = range(len(self)) if which is None else which
        return [(f"the checksum of {self.names[i]}'s values", str(checksum(self._standing(i)))) for i in which]

    def _standing(self, i: int) -> Tensor:
        """Return what ``before_update`` would make of ``dense[i]``."""
        if i in self.masters:
            return self._refreshed(i)
        if i in self.corrections.which:
            return self.corrections.master(i, self._targets[i].detach(), self.dense[i])
        dense = self.dense[i].detach()
        return dense.clone().copy_(self._targets[i]) if i in self._staged else dense

    def _refreshed(self, i: int) -> Tensor:
        """Return a master that has taken over what somebody has written into its parameter."""
        p, master = self._targets[i].detach(), self.dense[i]
        # Of two bfloat16 that are as near corrections take the other one.
        same = lacking(p, master)[1] if p.dtype is torch.bfloat16 else master.to(p.dtype) == p
        return torch.where(same, master, p.float())
