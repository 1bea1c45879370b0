"""FSDP2's reduce-scatter at 8, 4 or 1 bits: one all-to-all of packed messages, summed in float32 where they arrive.

FSDP2 hands over a flat tensor for each of its groups of parameters: a row for each rank, and in it the rank's part of
each gradient, padded to equal lengths. Residuals, if asked for, are of that tensor, which is of the unsharded
gradients. Replicas of the shards, if there are any, average what they have received by an all-reduce as DDP's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm import Format, QuantisedAllReduce, QuantisedReduceScatter, Step, Transport, agree, make_transport
from ..comm.agreement import Fact
from ..comm.quantised import Exchange, LevelMessages, owed
from ..core.compression import Compression, fill, named, stored_in, trained
from ..core.consensus import failure
from ..triton_kernels import FlatLayout
from .fsdp_groups import Group, ReplicaMean, Rows, check_group, factor_of, groups_of

KEPT_AS = "_fusedonebit_compression"
"""In the model."""


class Scatter:
    """What FSDP2 calls for a group of parameters, in place of its reduce-scatter.

    Args:
        compression: Whose.
        group: Of parameters.
        number: Which of the model's.

    Attributes:
        names: Of the parameters that were trained when this was made.
        rows: Where they lie in FSDP2's flat tensor.
        ranks: That have a shard each.
        sums: The exchanges that send it, by the length of its rows and of those of all that is trained.
        means: Those over replicas, by the same.
        factor: What FSDP2 lets sums be multiplied with.
        halved: Whether that was in float16, which FSDP2 divides before.
    """

    def __init__(self, compression: FsdpCompression, group: Group, number: int) -> None:
        self._compression, self.group, self._number = compression, group, number
        self.factor, self.halved = group.weight, False
        self.ranks = make_transport(group.process_group, compression.device)
        self.names, self.rows = group.trained
        self.sums: dict[tuple[int, int], QuantisedReduceScatter] = {}
        self.means: dict[tuple[int, int], QuantisedAllReduce] = {}
        self._summed: list[Exchange] = []  # in this pass, before replicas average
        self._error: Exception | None = None
        if self.names and compression.form.feedback is not None:  # its bytes are known from the start
            self._sum(self.rows.length)
            if compression.replicas is not None:
                self._mean(self.rows.length)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Do it on the current stream; see torch's ``ReduceScatter``.

        A rank that can't go on takes part all the same, with nothing, and raises where all others do.
        """
        compression, rows = self._compression, list(input_tensor.view(self.ranks.world_size, -1))
        compression.raise_what_was_told(self)
        self.factor, self.halved = factor_of(op, len(rows)), input_tensor.dtype is torch.float16
        exchange, self._error = self._exchange(len(rows[0]))
        if self._error is None:
            exchange(output_tensor, rows, compression.next_step(), self.factor)
        else:
            nothing = torch.zeros(self.rows.length, device=compression.device)
            aborted = compression.next_step()._replace(aborted=True)
            exchange(torch.empty_like(nothing), [nothing] * len(rows), aborted, 1.0)
            output_tensor.fill_(math.nan)
        self._summed = [exchange]
        if compression.replicas is None:
            compression.note(self, self._summed, self._error)

    def average(self, shard: Tensor) -> None:
        """Average what this rank has received over the replicas, in place."""
        compression = self._compression
        if shard.is_cuda:  # of the reduce-scatter's stream, whose memory FSDP2 may use again meanwhile
            shard.record_stream(torch.cuda.current_stream(shard.device))
        if self.ranks.world_size == 1:  # FSDP2 then scatters nothing
            compression.raise_what_was_told(self)
        if self._error is not None:  # of another length than the replicas'
            shard = torch.zeros(self.rows.length, device=compression.device)
        mean, summed = self._mean(shard.numel()), self._summed
        for exchange in summed:
            mean.abort_where(exchange.flags)
        mean([shard], compression.next_step())
        compression.note(self, [*summed, mean], self._error)

    def _exchange(self, length: int) -> tuple[QuantisedReduceScatter, Exception | None]:
        """Return what sends rows of a length; and why this rank can't."""
        known = self.rows.length
        if self._compression.form.feedback is None or length == known:
            return self._sum(length), None
        first = (self.names or self.group.trained.names)[0]
        error = RuntimeError(
            f"the gradients of {first}'s group are others than at compress(), {length} elements a rank instead of "
            f"{known}, and FSDP2 does not tell which: with feedback call model.set_reduce_scatter_unused_params(True) "
            "for those that are missing, and compress() again, after detach(), where parameters were frozen or unfrozen"
        )
        if not known:
            raise error  # on all ranks: nothing of the group was trained anywhere
        return self._sum(known), error

    def _longest(self) -> int:
        """Return the length of messages: that of all that is trained, so that ranks that lack gradients can say so."""
        return (self if self._compression.form.feedback is not None else self.group.trained).rows.length

    def _sum(self, length: int) -> QuantisedReduceScatter:
        key = length, self._longest()
        if key not in self.sums:
            form, count = self._compression.form, self.ranks.world_size
            layout, whole = (FlatLayout((n,) * count, count, form.block_size) for n in key)
            nbytes = LevelMessages.size(whole, form.bits)
            made = QuantisedReduceScatter(layout, self.ranks, form, self._compression.device, nbytes)
            self.sums[key] = self._compression.prepared(made, self._number)
        return self.sums[key]

    def _mean(self, length: int) -> QuantisedAllReduce:
        key = length, self._longest()
        if key not in self.means:
            form, replicas = self._compression.form, self._compression.replicas
            assert replicas is not None  # or FSDP2 has no hook
            layout, whole = (FlatLayout((n,), replicas.world_size, form.block_size) for n in key)
            nbytes = LevelMessages.size(whole, form.bits)
            made = QuantisedAllReduce(layout, replicas, form, self._compression.device, nbytes)
            self.means[key] = self._compression.prepared(made, self._number)
        return self.means[key]

    @property
    def left(self) -> dict[str, Any]:
        """Return what is left by the worker of the group, and by worker and server of its replicas' mean."""
        worker = next((each.worker for each in self.sums.values()), None)
        mean = next(iter(self.means.values()), None)
        return {"worker": worker} | ({} if mean is None else {"mean": mean.worker, "server": mean.server})


class FsdpCompression(Compression):
    """Sends the gradients of all of an FSDP2 model's groups; ``fusedonebit.compress`` makes it, ``detach`` ends it.

    The model keeps it.

    Args:
        model: The root, sharded.
        ranks: All that have a part of the model.
        replicas: The ranks that have the same shards; None: there are none.
        form: How gradients travel.
        scaler: As of ``compress``.

    Raises:
        DisagreementError: on all ranks, before anything is changed, if ranks that have shards train other parameters,
            or replicas have other shards.
    """

    sharded = True
    hint = (
        "Every rank must run as many backward passes, of the same model; where some lack gradients, call "
        "model.set_reduce_scatter_unused_params(True)"
    )

    def __init__(
        self,
        model: nn.Module,
        ranks: Transport,
        replicas: dist.ProcessGroup | None,
        form: Format,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        groups = groups_of(model)
        device = groups[0].device  # where gradients are; parameters may be offloaded
        super().__init__(form, ranks, device, scaler)
        alone = replicas is None or dist.get_world_size(replicas) == 1
        self.replicas = None if alone else make_transport(replicas, device)
        self._replicas, self._model = None if alone else replicas, weakref.ref(model)
        self._agree(groups)
        self._lenders: dict[tuple[type[Exchange], FlatLayout, int], Exchange] = {}
        self.scatters = [Scatter(self, group, number) for number, group in enumerate(groups)]
        stream = torch.cuda.Stream(device) if self.replicas is not None and device.type == "cuda" else None
        for scatter in self.scatters:
            scatter.group.give(scatter, None if alone else scatter.average, stream)
        vars(model)[KEPT_AS] = self

    def _agree(self, groups: Sequence[Group]) -> None:
        """Raise on all ranks unless those that have shards train alike, and replicas have the same shards."""
        facts: dict[dist.ProcessGroup, list[Fact]] = {}
        for group in groups:
            names, rows = group.trained
            facts.setdefault(group.process_group, []).extend(trained(zip(names, rows.shapes, strict=True)))
        between = [(make_transport(of, self.device), own, "train alike on every rank") for of, own in facts.items()]
        if self.replicas is not None:
            own = [("the shard of ranks that are replicas", str(groups[0].process_group.rank()))]
            between.append((self.replicas, own, "replicas= are the ranks that have the same shard"))
        errors = [failure(partial(agree, ranks, own, self.device, None, hint)) for ranks, own, hint in between]
        agree(self.ranks, [], self.device, next((error for error in errors if error is not None), None))

    @staticmethod
    def of(model: nn.Module) -> FsdpCompression | None:
        """Return what compresses a model's gradients; None if nothing does."""
        found: FsdpCompression | None = vars(model).get(KEPT_AS)
        return found

    def prepared(self, exchange: Any, number: int) -> Any:
        """Return an exchange of a group, with the messages of the first of its kind: a group's is over before the next.

        It draws as no other does, of any group or replica.
        """
        first = self._lenders.setdefault((type(exchange), exchange.layout, exchange.sent.buffer.shape[1]), exchange)
        if first is not exchange:
            exchange.borrow(first)
        replica, replicas = (0, 1) if self.replicas is None else (self.replicas.rank, self.replicas.world_size)
        exchange.salt = number * replicas + replica
        return exchange

    def next_step(self) -> Step:
        """Count exchanges, as all ranks do."""
        self.number = (self.number + 1) & 0x7FFFFFFF
        return Step(self.number, unit=self.unit)

    def detach(self) -> None:
        """Let FSDP2 send gradients as ever; replicas of shards are averaged exactly from then on."""
        scatters, self.scatters = self.scatters, []
        if (model := self._model()) is None or not scatters:
            return
        try:
            self.agree_to_end(scatters[0].ranks)
        finally:
            for scatter in scatters:
                scatter.group.leave(self._replicas)
            vars(model).pop(KEPT_AS, None)

    # ------------------------------------------------------------ checkpoints

    def _places(self) -> dict[str, Tensor]:
        """Return which of the shards, and of the replicas, this rank has."""
        shard = self.scatters[0].ranks.rank if self.scatters else 0
        places = {"shard": shard, "replica": 0 if self.replicas is None else self.replicas.rank}
        return {name: torch.tensor(place) for name, place in places.items()}

    def facts(self) -> dict[str, Any]:
        groups = [
            {"names": each.names, "shapes": each.rows.shapes, "factor": each.factor, "weight": each.group.weight}
            | {"halved": each.halved}
            for each in self.scatters
        ]
        shards = self.scatters[0].ranks.world_size if self.scatters else 1
        return {"groups": groups, "shards": shards, "replicas": self._replica_count}

    @property
    def _replica_count(self) -> int:
        return 0 if self.replicas is None else self.replicas.world_size

    def _cut_alike(self, about: Mapping[str, Any]) -> bool:
        """Return whether a state was saved by as many shards and replicas."""
        own = self.facts() | {"world_size": self.ranks.world_size}
        return all(about[key] == own[key] for key in ("world_size", "shards", "replicas"))

    def tensors(self) -> dict[str, Tensor]:
        found = self._places()
        for number, scatter in enumerate(self.scatters):
            found |= named(str(number), scatter.left)
        return found

    def room_for(self, about: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
        given = [group["names"] for group in about["groups"]]
        if given != [each.names for each in self.scatters]:
            raise ValueError(
                f"compression of another model, or one that is sharded by other modules: it has {len(given)} groups, "
                f"this model {len(self.scatters)}, or others' parameters are in them"
            )
        if any(group["halved"] for group in about["groups"]) and not self._cut_alike(about):
            raise ValueError(
                "residuals of gradients that were reduced in float16 must be loaded on as many ranks as have saved "
                f"them, {about['shards']} shards with {about['replicas']} replicas: FSDP2 divides such gradients by "
                "another number elsewhere; leave compression= out to drop them"
            )
        form, found = Format(*about["form"]), self._places()
        for number, group in enumerate(about["groups"]):
            for side, size in _sizes(about, group).items():
                found |= named(str(number), {side: form.room(size, self.device)})
        return found

    def take(self, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        if not self._cut_alike(about):
            self.add(about, self.ranks.rank, state)
            return
        for number, (group, scatter) in enumerate(zip(about["groups"], self.scatters, strict=True)):
            scatter.factor = group["factor"]
            fill(scatter.left, state, str(number))

    def add(self, about: Mapping[str, Any], rank: int, state: Mapping[str, Tensor]) -> None:
        shard, replica = int(state["shard"]), int(state["replica"])
        for number, (group, scatter) in enumerate(zip(about["groups"], self.scatters, strict=True)):
            then, block = Rows(group["shapes"], about["shards"]), Format(*about["form"]).block_size
            sides = {side: stored_in(state, f"{number}.{side}") for side in ("worker", "mean", "server")}
            rows = owed(then.layout(block), 0, sides["worker"], None)
            if not rows:
                continue
            if about["replicas"]:  # what a mean over replicas lacks, this worker lacks of its own row
                layout = FlatLayout((then.length,), about["replicas"], block)
                rows[shard] += owed(layout, replica, sides["mean"], sides["server"])[0] / group["factor"]
            weights = (group["weight"], about["replicas"]), (scatter.group.weight, self._replica_count)
            was, now = (weight / max(1, count) for weight, count in weights)
            for exchange in scatter.sums.values():
                exchange.owe([row * (was / now) for row in scatter.rows.join(then.split(rows))])

    def forget(self) -> None:
        for scatter in self.scatters:
            for of in scatter.left.values():
                for x in of or ():
                    if x is not None:
                        x.zero_()

    def bytes_kept(self) -> int:
        """Return the bytes of what is left on this rank."""
        kept = (side for scatter in self.scatters for side in scatter.left.values() if side is not None)
        return sum(self.form.kept_bytes(side.numbers.numel()) for side in kept)


def _sizes(about: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, int]:
    """Return the elements of ``Scatter.left``, of a state that was saved."""
    rows, block = Rows(group["shapes"], about["shards"]), Format(*about["form"]).block_size
    if not rows.length:
        return {}
    sizes = {"worker": rows.layout(block).numel}
    if about["replicas"]:
        mean = FlatLayout((rows.length,), about["replicas"], block)
        sizes |= {"mean": mean.numel, "server": mean.chunk_numel}
    return sizes


def check_sharded(model: Any, replicas: Any, form: Format) -> None:
    """Raise unless an FSDP2 model's gradients can be compressed."""
    found = groups_of(model) if isinstance(model, nn.Module) else []
    if not found and isinstance(model, FSDPModule):
        raise ValueError("model must have parameters that are sharded, got none: call fully_shard() before compress()")
    if not found:
        raise TypeError(
            f"model must be in DistributedDataParallel or fully_shard()ed, got {type(model).__name__}; compress first, "
            "compile then"
        )
    for group in found:
        scatter, hook = group.taken_by
        if isinstance(scatter, Scatter) or not isinstance(hook, ReplicaMean | None):
            raise RuntimeError("model is compressed already, or has an all-reduce hook: call detach() of that first")
        if hook is not None and replicas is None:
            raise ValueError("replicas must be given as before detach(), got None: the model's shards have replicas")
        check_group(group, form.feedback)
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas must be a torch.distributed group, got {type(replicas).__name__}")
    if replicas is None:
        return
    shards = {*dist.get_process_group_ranks(found[0].process_group)}
    if len(both := shards & {*dist.get_process_group_ranks(replicas)}) != 1:
        raise ValueError(
            f"replicas must be ranks that have the same shard as this one, got a group with {sorted(both)}, which have "
            "others: pass mesh['replicate'].get_group()"
        )
