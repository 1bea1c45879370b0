"""FSDP2's reduce-scatter at 8, 4 or 1 bits: one all-to-all of packed messages, summed in float32 where they arrive.

FSDP2 hands over a flat tensor for each of its groups of parameters: a row for each rank, and in it the rank's part of
each gradient, padded to equal lengths. Residuals, if asked for, are of that tensor, which is of the unsharded
gradients. Replicas of the shards, if there are any, average what they have received by an all-reduce as DDP's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm import DisagreementError, Format, QuantisedAllReduce, QuantisedReduceScatter, Step, agree, make_transport
from ..comm.quantised import FEEDBACK, Exchange, owed
from ..core.compression import Compression, fill, named, stored_in
from ..triton_kernels import FlatLayout

KEPT_AS = "_fusedonebit_compression"
"""In the model."""


class Rows:
    """Lies between the parameters of a group and its flat tensor.

    Args:
        shapes: Of the parameters, unsharded.
        ranks: How many rows.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], ranks: int) -> None:
        self.shapes, self.ranks = [tuple(shape) for shape in shapes], ranks
        # Of each parameter, how many of its rows a rank has, padding included, and how many elements a row has.
        self._parts = [(math.ceil(shape[0] / ranks), math.prod(shape[1:])) for shape in self.shapes]
        self.length = sum(rows * width for rows, width in self._parts)

    def layout(self, block_size: int) -> FlatLayout:
        """Return that of messages: a tensor for each rank."""
        return FlatLayout((self.length,) * self.ranks, self.ranks, block_size)

    def split(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters' own of a flat tensor's rows, of each a copy."""
        flat, found, at = torch.stack(list(rows)), [], 0
        for shape, (count, width) in zip(self.shapes, self._parts, strict=True):
            whole = flat[:, at : at + count * width].reshape(self.ranks * count, width)
            found.append(whole[: shape[0]].reshape(shape))
            at += count * width
        return found

    def join(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``split``: zeros are padding."""
        parts = []
        for x, shape, (count, width) in zip(params, self.shapes, self._parts, strict=True):
            padded = x.new_zeros(self.ranks * count, width)
            padded[: shape[0]] = x.reshape(shape[0], width)
            parts.append(padded.view(self.ranks, count * width))
        return list(torch.cat(parts, 1))


class Scatter:
    """What FSDP2 calls for a group of parameters, in place of its reduce-scatter.

    Args:
        compression: Whose; the model keeps it.
        group: What FSDP2 knows of the parameters.
        names: Of those that are trained.

    Attributes:
        rows: Where they lie in FSDP2's flat tensor.
        sums: The exchanges that send it, by the length of its rows.
        means: Those over replicas, by the length of what is averaged.
        factor: What sums are multiplied with.
    """

    def __init__(self, compression: FsdpCompression, group: Any, names: Sequence[str]) -> None:
        self._compression, self.names, self.factor = weakref.proxy(compression), list(names), 1.0
        self.ranks = make_transport(group._reduce_scatter_process_group, compression.device)
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        self.rows = Rows([tuple(p._orig_size) for p in trained], self.ranks.world_size)
        self.sums: dict[int, QuantisedReduceScatter] = {}
        self.means: dict[int, QuantisedAllReduce] = {}
        if compression.form.feedback is not None:  # its bytes are known from the start
            self.sums[self.rows.length] = self._sum(self.rows.length)
            if compression.replicas is not None:
                self._mean(self.rows.length)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Do it on the current stream; see torch's ``ReduceScatter``."""
        compression, rows = self._compression, list(input_tensor.view(self.ranks.world_size, -1))
        length = len(rows[0])
        if compression.form.feedback is not None and length != self.rows.length:
            nothing = torch.zeros(self.rows.length, device=compression.device)
            step = Step(compression.next_number(), aborted=True)
            self.sums[self.rows.length](torch.empty_like(nothing), [nothing] * len(rows), step, 1.0)
            self._abort_mean(self.rows.length)
            raise RuntimeError(
                f"the gradients of {self.names[0]}'s group are others than at compress(), {length} elements a rank "
                f"instead of {self.rows.length}, and FSDP2 does not tell which: with feedback call "
                "model.set_reduce_scatter_unused_params(True) for those that are missing, and compress() again, after "
                "detach(), where parameters were frozen or unfrozen"
            )
        if length not in self.sums:
            self.sums[length] = self._sum(length)
        self.factor = factor_of(op, len(rows))
        try:
            compression.run(self.sums[length], lambda step: self.sums[length](output_tensor, rows, step, self.factor))
        except DisagreementError:
            self._abort_mean(length)
            raise

    def _abort_mean(self, length: int) -> None:
        """Take part in what replicas are in, with nothing, so that they raise as well."""
        if self._compression.replicas is not None:
            nothing = torch.zeros(length, device=self._compression.device)
            self._mean(length)([nothing], Step(self._compression.next_number(), aborted=True))

    def average(self, shard: Tensor) -> None:
        """Average what this rank has received over the replicas, in place."""
        if shard.is_cuda:  # of the reduce-scatter's stream, whose memory FSDP2 may use again meanwhile
            shard.record_stream(torch.cuda.current_stream(shard.device))
        mean = self._mean(shard.numel())
        self._compression.run(mean, lambda step: mean([shard], step))

    def _sum(self, length: int) -> QuantisedReduceScatter:
        form, ranks = self._compression.form, self.ranks.world_size
        layout = FlatLayout((length,) * ranks, ranks, form.block_size)
        made = QuantisedReduceScatter(layout, self.ranks, form, self._compression.device)
        self._compression.lend(made)
        return made

    def _mean(self, length: int) -> QuantisedAllReduce:
        if length in self.means:
            return self.means[length]
        form, replicas = self._compression.form, self._compression.replicas
        assert replicas is not None  # or FSDP2 has no hook
        layout = FlatLayout((length,), replicas.world_size, form.block_size)
        self.means[length] = made = QuantisedAllReduce(layout, replicas, form, self._compression.device)
        self._compression.lend(made)
        return made


def factor_of(op: Any, ranks: int) -> float:
    """Return what a sum is multiplied with; ValueError for what is no sum."""
    plain = isinstance(op, dist.ReduceOp.RedOpType)
    kind, factor = (op, None) if plain else op.__getstate__()
    if kind == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM and isinstance(factor, float):
        return factor
    raise ValueError(f"the reduce-scatter's op must be AVG, SUM or PREMUL_SUM by a number, got {op}")


class FsdpCompression(Compression):
    """Sends the gradients of all of an FSDP2 model's groups; ``fusedonebit.compress`` makes it, ``detach`` ends it.

    The model keeps it.

    Args:
        model: The root, sharded.
        replicas: The ranks that have the same shards; None: there are none.
        form: How gradients travel.
        scaler: As of ``compress``.
    """

    name = "compress()"

    def __init__(
        self,
        model: nn.Module,
        replicas: dist.ProcessGroup | None,
        form: Format,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        device = groups_of(model)[0][1].device  # where gradients are; parameters may be offloaded
        super().__init__(form, make_transport(None, device), device, scaler)
        alone = replicas is None or dist.get_world_size(replicas) == 1
        self.replicas = None if alone else make_transport(replicas, device)
        self.scatters: list[Scatter] = []
        self._lenders: dict[tuple[type[Exchange], FlatLayout], Exchange] = {}
        self._before: list[tuple[Any, Any]] = []
        prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        stream = torch.cuda.Stream(device) if self.replicas is not None and device.type == "cuda" else None
        for module, group in groups_of(model):
            # Not ``named_parameters()``: after a forward pass the root's are other objects.
            places: list[Any] = [vars(p)["_module_info"] for p in group.fsdp_params if p.sharded_param.requires_grad]
            names = [f"{prefixes[each.module]}{each.param_name}" for each in places]
            if not names:
                continue
            scatter = Scatter(self, group, names)
            self.scatters.append(scatter)
            self._before.append((weakref.ref(group), group._reduce_scatter_comm))
            module.set_custom_reduce_scatter(scatter)
            if self.replicas is not None:
                module.set_all_reduce_hook(scatter.average, stream=stream)
        if self.replicas is not None and self.scatters:
            facts = [("the shard of ranks that are replicas", str(self.scatters[0].ranks.rank))]
            agree(self.replicas, facts, device, None, "replicas= are the ranks that have the same shard")
        vars(model)[KEPT_AS], self._model = self, weakref.ref(model)

    @staticmethod
    def of(model: nn.Module) -> FsdpCompression | None:
        """Return what compresses a model's gradients; None if nothing does."""
        found: FsdpCompression | None = vars(model).get(KEPT_AS)
        return found

    def lend(self, exchange: Exchange) -> None:
        """Give an exchange the messages of the first of its layout: a group's is over before the next."""
        first = self._lenders.setdefault((type(exchange), exchange.layout), exchange)
        if first is not exchange:
            exchange.borrow(first)

    def run(self, exchange: Any, call: Any) -> None:
        """Make an exchange of what is next in a backward pass."""
        self.raise_what_was_told(exchange)
        call(Step(self.next_number(), unit=self.unit))
        self.note(exchange)

    def next_number(self) -> int:
        """Count exchanges, as all ranks do."""
        self.number = (self.number + 1) & 0x7FFFFFFF
        return self.number

    def detach(self) -> None:
        """Let FSDP2 send gradients as ever; what is left is lost. Call it on every rank, between two steps."""
        for group, before in self._before:
            if (found := group()) is not None:
                found._reduce_scatter_comm, found._all_reduce_hook = before, None
                found._all_reduce_hook_stream = None
        self._before, self.scatters = [], []
        if (model := self._model()) is not None:
            vars(model).pop(KEPT_AS, None)

    # ------------------------------------------------------------ checkpoints

    def _places(self) -> dict[str, Tensor]:
        """Return which of the shards, and of the replicas, this rank has."""
        shard = self.scatters[0].ranks.rank if self.scatters else 0
        places = {"shard": shard, "replica": 0 if self.replicas is None else self.replicas.rank}
        return {name: torch.tensor(place) for name, place in places.items()}

    def facts(self) -> dict[str, Any]:
        shards = self.scatters[0].ranks.world_size if self.scatters else 1
        groups = [[each.names, each.rows.shapes, each.factor] for each in self.scatters]
        return {
            "groups": groups,
            "shards": shards,
            "replicas": 0 if self.replicas is None else self.replicas.world_size,
        }

    def tensors(self) -> dict[str, Tensor]:
        found = self._places()
        for number, scatter in enumerate(self.scatters):
            found |= named(str(number), _sides(scatter))
        return found

    def room_for(self, about: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
        given = [names for names, *_ in about["groups"]]
        if given != [each.names for each in self.scatters]:
            raise ValueError(
                f"compression of another model, or one that is sharded by other modules: it has {len(given)} groups, "
                f"this model {len(self.scatters)}, or others' parameters are in them"
            )
        form, found = Format(*about["form"]), self._places()
        for number, (_, shapes, _) in enumerate(about["groups"]):
            for side, size in _sizes(about, shapes).items():
                found |= named(str(number), {side: form.room(size, self.device)})
        return found

    def take(self, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        if [about["shards"], about["replicas"]] != [self.facts()["shards"], self.facts()["replicas"]]:
            self.add(about, self.ranks.rank, state, 1.0)
            return
        for number, ((*_, factor), scatter) in enumerate(zip(about["groups"], self.scatters, strict=True)):
            scatter.factor = factor
            fill(_sides(scatter), state, str(number))

    def add(self, about: Mapping[str, Any], rank: int, state: Mapping[str, Tensor], share: float) -> None:
        shard, replica = int(state["shard"]), int(state["replica"])
        for number, ((_, shapes, factor), scatter) in enumerate(zip(about["groups"], self.scatters, strict=True)):
            then, scatter.factor = Rows(shapes, about["shards"]), factor
            sides = {side: stored_in(state, f"{number}.{side}") for side in ("worker", "mean", "server")}
            block = Format(*about["form"]).block_size
            rows = owed(then.layout(block), 0, sides["worker"], None)
            if not rows:
                continue
            if about["replicas"]:  # what a mean over replicas lacks, this worker lacks of its own row
                layout = FlatLayout((then.length,), about["replicas"], block)
                rows[shard] += owed(layout, replica, sides["mean"], sides["server"])[0] / factor
            for exchange in scatter.sums.values():
                exchange.owe([row * share for row in scatter.rows.join(then.split(rows))])

    def forget(self) -> None:
        for scatter in self.scatters:
            for of in _sides(scatter).values():
                for x in of or ():
                    if x is not None:
                        x.zero_()

    def bytes_kept(self) -> int:
        """Return the bytes of what is left on this rank."""
        if self.form.feedback is None:
            return 0
        each = FEEDBACK[self.form.feedback].itemsize
        numel = sum(s.numbers.numel() for scatter in self.scatters for s in _sides(scatter).values() if s)
        return int(numel * each)


def _sides(scatter: Scatter) -> dict[str, Any]:
    """Return what is left by the worker of a group, and by worker and server of its replicas' mean."""
    worker = next((each.worker for each in scatter.sums.values()), None)
    mean = next(iter(scatter.means.values()), None)
    return {"worker": worker} | ({} if mean is None else {"mean": mean.worker, "server": mean.server})


def _sizes(about: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the elements of ``_sides``, of a state that was saved."""
    rows, block = Rows(shapes, about["shards"]), Format(*about["form"]).block_size
    sizes = {"worker": rows.layout(block).numel}
    if about["replicas"]:
        mean = FlatLayout((rows.length,), about["replicas"], block)
        sizes |= {"mean": mean.numel, "server": mean.chunk_numel}
    return sizes


def groups_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the modules of a model that are sharded, with what FSDP2 knows of the parameters of each."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [(module, module._get_fsdp_state()._fsdp_param_group) for module in modules]
    return [(module, group) for module, group in states if group is not None]


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
    for _, group in found:
        if group._all_reduce_hook is not None or isinstance(group._reduce_scatter_comm, Scatter):
            raise RuntimeError("model is compressed already, or has an all-reduce hook: call detach() of that first")
        if group.mesh_info.replicate_mesh_dim is not None:
            raise ValueError(
                "model must be sharded over a mesh of one dimension, got one of two: torch all-reduces over replicas "
                "before anybody could compress that; call fully_shard(mesh=mesh['shard']), and "
                "compress(model, replicas=mesh['replicate'].get_group())"
            )
        if form.feedback is not None and any(p.fsdp_placement.dim for p in group.fsdp_params):
            raise ValueError(
                "feedback must be None where parameters are sharded along another dimension than the first, "
                f"got {form.feedback} at {form.bits} bits"
            )
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas must be a torch.distributed group, got {type(replicas).__name__}")
    if replicas is None:
        return
    shards = {*dist.get_process_group_ranks(found[0][1].mesh_info.shard_process_group)}
    if len(both := shards & {*dist.get_process_group_ranks(replicas)}) != 1:
        raise ValueError(
            f"replicas must be ranks that have the same shard as this one, got a group with {sorted(both)}, which have "
            "others: pass mesh['replicate'].get_group()"
        )
