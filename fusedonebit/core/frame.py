"""What an optimizer and its algorithm both work with: parameters, ranks, options, counts, the flat index space."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..comm import TorchTransport, Transport, checksum
from ..comm.agreement import Fact
from ..triton_kernels import Coef, FlatLayout, LiveTable, choose_block_size, live_table
from ..triton_kernels.nouns import Places
from ..triton_kernels.tables import tables_of
from .consensus import check_16_bits, check_device, check_masks
from .hyper_parameters import HyperParameters
from .options import CoefficientTable, numbers, stated
from .params import ParameterList
from .resolved import Options
from .scaling import NO_SCALE, Scaling
from .settings import Numerics, Wire
from .sharding import check_groups, levels, local
from .steps import Steps
from .under_ddp import UnderDdp
from .world import World

COMPARED_EVERY = 64
"""Steps after which parameters and state that all ranks have in common enter the next digest, and what model-parallel
ranks have alike is compared."""


class Owner(Protocol):
    """Is the optimizer, as hooks of the backward pass and of checkpoints need it."""

    param_groups: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """Return what it is called."""

    def begin_step(self) -> None:
        """Enter the stage of the coming step, once."""

    def take_hyper_parameters(self) -> None:
        """Take the groups' hyper-parameters, where they were changed."""

    def publish_state(self) -> None:
        """Put views of what is kept into ``state``."""

    def register_state_dict_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call ``hook`` before a checkpoint is made."""

    def register_load_state_dict_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call ``hook`` before a checkpoint is loaded."""


class Frame:
    """What every optimizer has, whatever its algorithm.

    Args:
        owner: The optimizer, which is held weakly.
        ranks: With which it takes steps.

    Attributes:
        name: The optimizer's, see ``DistributedOptimizer.title``.
        options: As settled.
        hyper: The last good hyper-parameters of them.
        parameters: Those that train.
        masks: Elements that count, bool of a parameter's shape, where not all do.
        steps: All that counts them.
        device: Where everything lies.
        layout: The flat index space.
        places: The same, as ops take it.
        live: Which of its elements count.
        coefficients: What kernels multiply with.
        scaling: Clipping and loss scales.
        under_ddp: What DistributedDataParallel does.
        given_block_size: A checkpoint's; None: it is chosen.
        missing: Tensors of which this rank has no gradient in this step.
        absent: Of which no rank has one: bool [tensors]; None: there are none.
        loss_scale: What a ``GradScaler`` has set for this step.
        late_error: What this step raises once all ranks know of it.
        nothing: Stands for a gradient that is not there: float32 [0].
        sums_up: Whether a checkpoint gets checksums of its tensors; ``dcp`` makes them of what it writes.
        expected_header: In a tuple, the header of a checkpoint that is about to be loaded, None of AdamW's.
    """

    options: Options
    hyper: HyperParameters
    parameters: ParameterList
    steps: Steps
    layout: FlatLayout
    live: LiveTable
    places: Places
    coefficients: CoefficientTable
    scaling: Scaling

    def __init__(self, owner: Owner, ranks: World) -> None:
        self.owner = weakref.ref(owner)
        self.name, self.ranks, self.device = owner.title, ranks, ranks.device
        self.masks: dict[Tensor, Tensor] = {}
        self.under_ddp = UnderDdp()
        self.given_block_size: int | None = None
        self.missing: tuple[int, ...] = ()
        self.absent: Tensor | None = None
        self.late_error: Exception | None = None
        self.loss_scale = NO_SCALE
        self.sums_up = True
        self.expected_header: tuple[Mapping[str, Any] | None] | None = None
        self.nothing = torch.empty(0, device=self.device)
        self._until_compared = 0  # steps until model-parallel ranks next compare what they have alike

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's ``param_groups``."""
        owner = self.owner()
        assert owner is not None  # who else asks
        return owner.param_groups

    # ---------------------------------------------------------------- construction

    def take_parameters(self) -> None:
        """List the groups' parameters, and those that model-parallel ranks have alike; raise if they can't be used."""
        ranks = self.ranks.model_parallel.groups
        split_over = ranks[0].transport if ranks else None
        self.parameters = ParameterList(self.groups, self.options.formats.parameters.dtype, split_over)

    def check_16_bits(self, corrects: bool) -> None:
        """Raise ValueError if parameters can't be rounded, or have masters, as the options say."""
        check_16_bits(self.options.numerics, self.name, corrects, self.parameters)

    def check_shards(self, shards: bool) -> None:
        """Raise ValueError if parameters are sharded and can't be, or over ranks that are to be averaged over."""
        averaged = getattr(self.ranks.transport, "group", None), self.ranks.transport.world_size
        for group in self.ranks.model_parallel.groups:
            if isinstance(group.transport, TorchTransport):
                check_groups(group.transport.group, *averaged)
        mesh = self.parameters.mesh
        if mesh is None or self.ranks.model_parallel.groups:
            return
        if not shards:
            raise ValueError(
                f"parameters of {self.name} must be whole, but {self.parameters.names[0]} is a DTensor; "
                "use OneBitAdam, OneBitLamb or OneBitMuon for a model that fully_shard() has sharded"
            )
        check_groups(mesh.get_group(), *averaged)

    def check_options(self, numerics: Numerics, wire: Wire) -> None:
        """Take masks and levels; raise ValueError for what these parameters and ranks can't have."""
        if self.ranks.model_parallel.groups and self.options.bucket_count > 1:
            raise ValueError(
                f"buckets must be None, and overlap False, with Wire(model_parallel=...), got "
                f"{self.options.bucket_count} buckets: parts of a model skip a step together, before anything is sent"
            )
        masks = {} if numerics.mask is None else numerics.mask
        check_masks(masks, self.parameters)
        self.masks = dict(masks)
        check_device(self.device)
        self.ranks.take_levels(None if wire.hierarchy is None else self._levels_of(wire.hierarchy))

    def _levels_of(self, hierarchy: Any) -> tuple[Transport, Transport]:
        """Return the ranks between nodes and those inside one; TypeError or ValueError if they are not to be had."""
        self.options.check_levels()
        if self.ranks.shards.count > 1:
            raise ValueError("hierarchy must be None where parameters are sharded: fully_shard is one already")
        return levels(hierarchy, self.ranks.transport, self.device)

    def set_up(self) -> None:
        """Count steps from 0; all ranks call it."""
        alone, options = self.ranks.transport.world_size == self.ranks.shards.count == 1, self.options
        how = self.device, alone, options.faults.nonfinite, options.wire.capturable
        self.steps = Steps(self.name, self.parameters.owners, *how)
        _ = self.ranks.rows  # all ranks make it

    def build(self, columns: Mapping[Coef, str], linear: bool) -> None:
        """Lay out the parameters, and make what follows from that; ``columns`` and ``linear`` as of ``Algorithm``."""
        plist, device = self.parameters, self.device
        self.layout = self._laid_out()
        self._tables = tables_of(self.layout, device)  # kept, because launches share what somebody keeps
        self.put_live(self.active_mask())
        plist.lay_out(self.layout)
        self.steps.allocate(len(plist))
        self.steps.begin_anew()
        self.hyper.forget()
        self.hyper.keep_rates(self.groups)
        how: dict[str, Any] = {"floor": self.options.coefficient_floor, "linear": linear}
        corrected, rates = self.options.numerics.bias_correction, self.hyper.rates
        self.coefficients = CoefficientTable(plist.group_of, device, corrected, columns, rates, **how)
        counted: Tensor | None = None
        if any(plist.replicas) and self.ranks.model_parallel.groups[0].transport.rank > 0:
            elsewhere = torch.tensor(plist.replicas, device=device)
            counted = (~elsewhere)[self.places.block_tensor.long()].double()
        self.scaling = Scaling(self.layout, device, counted)
        self.missing, self.absent, self._until_compared = (), None, 0
        self.under_ddp.averaged = False

    def _laid_out(self) -> FlatLayout:
        """Return the flat index space; as long for each shard, so that checkpoints are rectangular."""
        sizes, chunks = self.parameters.sizes, self.ranks.transport.world_size * self.options.bucket_count
        given = self.options.wire.block_size or self.given_block_size
        block_size = given or choose_block_size(sizes, chunks)
        if self.ranks.shards.count == 1:
            return FlatLayout(sizes, chunks, block_size)
        if given is None:
            block_size = -int(self.ranks.shards.max(torch.tensor([-block_size], device=self.device)))
        blocks = torch.tensor([FlatLayout(sizes, chunks, block_size).n_blocks], device=self.device)
        return FlatLayout(sizes, chunks, block_size, int(self.ranks.shards.max(blocks)))

    def put_live(self, live: LiveTable) -> None:
        """Let these elements count, and tell ops so."""
        self.live, self.places = live, Places.of(self.layout, self._tables.tensor, live)

    def active_mask(self, excluded: Sequence[int] = ()) -> LiveTable:
        """Return which elements count: those no mask keeps still, of tensors that are not excluded."""
        masks = {}
        for i, (owner, p) in enumerate(zip(self.parameters.owners, self.parameters.params, strict=True)):
            if owner in self.masks:
                ordered = torch.empty_strided(p.shape, self.parameters.dense[i].stride(), dtype=torch.bool)
                masks[i] = ordered.copy_(local(self.masks[owner])).as_strided((p.numel(),), (1,))
        return live_table(self.layout, masks, excluded).to(self.device)

    # ---------------------------------------------------------------- agreement

    def values_of_replicas(self) -> list[Fact]:
        """Return checksums of the parameters that model-parallel ranks have alike."""
        return self.parameters.values([i for i, shared in enumerate(self.parameters.replicas) if shared])

    def agree_on_everything(self, error: Exception | None, broadcast: bool = False) -> None:
        """Return on all ranks if all mean the same and none has an ``error``; else raise on all.

        Values come last. Those of different shards differ; all else they have in common.
        """
        facts = [] if error else self._facts()
        names = [] if error else self.parameters.names
        of_a_shard = {what for name in names for what in (name, f"the mask of {name}")}
        whole = [] if error else zip(names, self.parameters.owners, strict=True)
        of_all = [fact for fact in facts if fact[0] not in of_a_shard]
        of_all += [(f"the shape of {name}, all shards together", str(tuple(p.shape))) for name, p in whole]
        of_any_part = [] if error else ["the optimizer", *self.options.names()]
        of_model = [fact for fact in facts if fact[0] in of_any_part]
        of_model += [] if error else [("whether any parameter trains", str(bool(names)))]
        alike = [] if error else zip(self.parameters.facts()[1:], self.parameters.replicas, strict=True)
        of_replicas = [fact for fact, shared in alike if shared]
        hint = "construct the optimizer alike on every rank"
        self.ranks.agree(facts, of_all, error, hint, of_model, of_replicas)
        if broadcast:
            self.parameters.before_update()
            for dense in self.parameters.dense:
                self.ranks.transport.broadcast(dense.detach().as_strided((dense.numel(),), (1,)))
            with torch.no_grad():
                self.parameters.after_update()
        self._agree_on_values(
            "seed all ranks alike, load the same checkpoint, or pass Wire(broadcast_parameters=True) to use rank 0's"
        )

    def _agree_on_values(self, hint: str) -> None:
        """Return on all ranks if all have the same parameters; else raise on all, naming the first that differs."""
        self.ranks.agree(self.parameters.values(), hint=hint, of_replicas=self.values_of_replicas())

    def agree_on_loaded(self) -> None:
        """Compare parameters in the first step after a load: models may be loaded later. None to compare with: none."""
        if self.ranks.transport.world_size * self.ranks.model_parallel.count > 1:
            self._agree_on_values(
                "the checkpoint's model must be loaded alike on every rank. This was found at the first step after "
                "load_state_dict(), and no parameter was changed"
            )

    def _facts(self) -> list[Fact]:
        """Return everything but values that must be equal on all ranks."""
        values, plist = self.options.values(), self.parameters
        groups = [
            (f"{key} of group {i}", repr(value.tolist() if isinstance(value := group[key], Tensor) else value))
            for i, group in enumerate(map(numbers, self.groups))
            for key in self.hyper.names
        ]
        checksums = {p: f"checksum {checksum(local(mask).contiguous())}" for p, mask in self.masks.items()}
        named = list(zip(plist.owners, plist.names, strict=True))
        return [
            ("the optimizer", self.name),
            *((name, stated(values[name])) for name in self.options.names()),
            ("the number of ranks of a node", str(self.ranks.inside.world_size)),
            ("the number of model-parallel ranks", str(self.ranks.model_parallel.count)),
            *plist.facts(),
            ("the number of groups", str(len(self.groups))),
            *((f"the group of {name}", str(n)) for name, n in zip(plist.names, plist.group_of, strict=True)),
            *groups,
            *((f"the mask of {name}", checksums.get(p, "none")) for p, name in named),
        ]

    def compare_replicas(self, error: Exception | None) -> Exception | None:
        """Return ``error``, or, in every 64th step, that model-parallel ranks no longer have parameters alike."""
        groups = self.ranks.model_parallel.groups
        due, self._until_compared = self._until_compared == 0, (self._until_compared - 1) % COMPARED_EVERY
        if not due:
            return error
        hint = "no parameter was changed in this step; all must be loaded, and changed, alike"
        with self.steps.breaking():
            return self.ranks.disagreement(groups[0], self.values_of_replicas(), error, hint)

    # ---------------------------------------------------------------- checkpoints

    def wrote(self, header: Mapping[str, Any]) -> bool:
        """Return whether an optimizer of the same class has written a checkpoint, on ranks that it tells of."""
        return header.get("algorithm") == self.name and "world_size" in header

    def cut(self) -> dict[str, int]:
        """Return by what the rows along the flat index space are ordered: ranks, buckets, ranks of a node."""
        inside = 1 if self.ranks.levels is None else self.ranks.levels[1].world_size
        return {"world_size": self.ranks.transport.world_size, "buckets": self.options.bucket_count, "inside": inside}

    def cut_alike(self, header: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint's rows are ordered by the same."""
        return all(header[key] == value for key, value in self.cut().items())

    def sums_of_masks(self) -> dict[str, int]:
        """Return checksums of the masks by parameter; of shards, which differ, none."""
        given, owners = self.masks, enumerate(self.parameters.owners)
        whole = self.ranks.shards.count == 1
        return {str(i): checksum(given[p].contiguous()) for i, p in owners if p in given and whole}

    def masked_otherwise(self, header: Mapping[str, Any]) -> list[str]:
        """Return the parameters of which a checkpoint had another mask; of shards nothing is known."""
        if self.ranks.shards.count > 1:
            return []
        was, now = header.get("masks", {}), self.sums_of_masks()
        return [name for i, name in enumerate(self.parameters.names) if was.get(str(i)) != now.get(str(i))]

    def check_layout(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if the checkpoint of a compressed stage can't be laid out here as it was."""
        own = {
            "algorithm": self.name,
            "shards": self.ranks.shards.count,
            "block_size": self.options.wire.block_size or header["block_size"],
            "strides": self.parameters.strides(),
        }
        way_out = {
            "algorithm": "construct that one, with its policies; ZeroOneAdam(params) once had policies.EveryStep()",
            "shards": "use as many, or the checkpoint of a warm-up, or begin from the model alone",
            "block_size": "pass that as Wire(block_size=...), or none",
        }
        for key, value in own.items():
            if header[key] != value:
                hint = way_out.get(key, "construct the model and the optimizer as they were")
                raise ValueError(f"the checkpoint's {key} is {header[key]}, but here it is {value}; {hint}")
        if other := self.masked_otherwise(header):
            raise ValueError(
                f"the checkpoint was written with another mask for {', '.join(other)}, which can only be changed in "
                "the warm-up: there is no variance, and no sign, of what a mask has kept still. Construct the "
                "optimizer with the same Numerics(mask=...), or begin anew from the model alone (OneBitAdam and "
                "OneBitLamb: with the checkpoint as Freeze(step=0, warm_start=...))"
            )

    # ---------------------------------------------------------------- a step

    @property
    def rounding(self) -> Tensor | None:
        """Return what ops draw the random bits of stochastic rounding from; on the device, equal on all ranks."""
        return self.steps.updates if self.options.formats.parameters.random else None

    @property
    def tag_of_shards(self) -> int:
        """Return what ranks with other shards must have alike: hyper-parameters and the number of steps, 31 bits."""
        return (self.coefficients.tag ^ self.steps.count.total) & 0x7FFFFFFF

    def united(self, flags: Tensor) -> Tensor:
        """Return the flags that any rank with a part of the model has, int32 [1]: all skip a step together."""
        return self.ranks.model_parallel.unite(flags, self.steps.number)

    def counters(self) -> tuple[Tensor | None, ...]:
        """Return what the end of a step counts by, and on; called once in a step."""
        return self.absent, *self.steps.counters()

    def say_where(self, what: str) -> str:
        """Return ``what`` has gone wrong, with this rank, its step and its hyper-parameters."""
        if self.ranks.model_parallel.count > 1:
            what = f"model-parallel ranks differ in the number of steps, or some of them have found: {what}"
        here = "; ".join(", ".join(f"{k}={group[k]}" for k in self.hyper.names) for group in self.groups)
        return f"{what}. On rank {self.ranks.transport.rank}, in its step {self.steps.count.total}: {here}"

    def index(self, param: Tensor) -> int:
        """Return the number of a parameter; ValueError if it is none of these."""
        for i, p in enumerate(self.parameters.owners):
            if p is param:
                return i
        got = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
        raise ValueError(f"param must be a trainable parameter of this optimizer, got {got}")
