"""The base class of optimizers, which has all but the step: parameters, groups, ranks, and the state they declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...comm import (
    Flag,
    TorchTransport,
    Transport,
    checksum,
    make_transport,
)
from ...comm.agreement import Fact
from ...triton_kernels import Coef, FlatLayout, LiveTable, choose_block_size, live_table
from ...triton_kernels.nouns import Places
from ...triton_kernels.tables import tables_of
from ..arguments import check_keys
from ..consensus import check_corrections, check_device, check_masks, check_rounding, failure
from ..given import first_device, first_mesh, materialise, materialise_group
from ..hyper_parameters import HyperParameters
from ..interrupts import SignalsWait
from ..options import CoefficientTable, check_group, numbers, stated
from ..params import ParameterList
from ..settings import NUMERICS, WIRE, Options, Params, Ranks
from ..sharding import check_groups, group_of, levels, local, model_ranks
from ..steps import Steps
from ..world import World
from .header import KEY, Fields
from .spec import Specs, StateSpec

Phase = Literal["uncompressed", "warmup", "compression", "local", "one-bit"]


class Keeper(torch.optim.Optimizer):
    """Base class of all optimizers: construction, parameter groups, declared state, checkpoints, agreement of ranks.

    A subclass declares the tensors (``kept``, see ``StateSpec``) and plain values (``header_fields``) that it carries
    from step to step; allocation, saving and loading follow from that. ``DistributedOptimizer`` adds the step.
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

    takes_shards: ClassVar[bool] = True
    """Whether parameters may be shards of tensors."""

    corrects: ClassVar[bool] = False
    """Whether all its ops that read parameters take corrections, so that these may be all that is kept of masters."""

    masters_of_rank: ClassVar[bool] = False
    """Whether each rank has master weights of its own."""

    sums_up = True
    """Whether a checkpoint gets checksums of its tensors; ``dcp`` makes them of what it writes."""

    options: Options
    _built: bool = False

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        process_group: Ranks = None,
        **settings: Any,
    ) -> None:
        # From here to the agreement no rank may leave on its own: the others would wait for it.
        params, error = materialise(params)
        self.device = first_device(params)
        transport, wire = make_transport(group_of(process_group), self.device), WIRE
        parts = model_ranks(getattr(settings.get("wire"), "model_parallel", None), self.device)
        self.ranks = World(transport, self.device, parts, None if parts else first_mesh(params))
        try:
            if error is not None:
                raise error
            self.options = options = self.settings.of(type(self).__name__, settings)
            options.check()
            # Of a group; torch adds others to its own table.
            names = (*defaults, *self.settings.grouped)
            self.hyper = HyperParameters(names, self.device, options.capturable)
            wire = settings.get("wire", wire)
            if wire.hierarchy is None and wire.hierarchy_dtype is not torch.float32:
                got = f"got {wire.hierarchy_dtype!r}"
                raise ValueError(f"hierarchy_dtype must be torch.float32 without Wire(hierarchy=...), {got}")
            defaults = defaults | {name: getattr(options, name) for name in options.grouped}
            self.check_group(numbers(defaults))
            super().__init__(params, defaults)
            # Of groups, torch's unflattening takes up only what is there: so a checkpoint's header is.
            self.param_groups[0][KEY] = ""
            self.hyper.keep_rates(self.param_groups)
            if parts and options.bucket_count > 1:
                raise ValueError(
                    f"buckets must be None, and overlap False, with Wire(model_parallel=...), got "
                    f"{options.bucket_count} buckets: parts of a model skip a step together, before anything is sent"
                )
            self.take_parameters()
            self._check_shards()
            masks = settings.get("numerics", NUMERICS).mask or {}
            check_masks(masks, self.parameters)
            self._check_16_bits()
            self.masks: dict[Tensor, Tensor] = dict(masks)
            check_device(self.device)
            self.ranks.take_levels(None if wire.hierarchy is None else self._levels_of(wire.hierarchy))
        except Exception as caught:
            error = caught
        self._agree_on_everything(error, wire.broadcast_parameters)
        self.set_up()

    # ---------------------------------------------------------------- construction

    def take_parameters(self) -> None:
        """List the groups' parameters, and those that model-parallel ranks have alike; raise if they can't be used."""
        ranks = self.ranks.model_parallel.groups
        split_over = ranks[0].transport if ranks else None
        self.parameters = ParameterList(self.param_groups, self.options.master_weights, split_over)

    def _check_16_bits(self) -> None:
        """Raise ValueError if parameters can't be rounded, or have masters, as the options say."""
        check_rounding(self.options.stochastic_rounding, self.parameters)
        check_corrections(self.options.master_weights, type(self).__name__, self.corrects, self.parameters)

    def _check_shards(self) -> None:
        """Raise ValueError if parameters are sharded and can't be, or over ranks that are to be averaged over."""
        averaged = getattr(self.ranks.transport, "group", None), self.ranks.transport.world_size
        for group in self.ranks.model_parallel.groups:
            if isinstance(group.transport, TorchTransport):
                check_groups(group.transport.group, *averaged)
        mesh = self.parameters.mesh
        if mesh is None or self.ranks.model_parallel.groups:
            return
        if not self.takes_shards:
            raise ValueError(
                f"parameters of {type(self).__name__} must be whole, but {self.parameters.names[0]} is a DTensor; "
                "use OneBitAdam or OneBitLamb for a model that fully_shard() has sharded"
            )
        check_groups(mesh.get_group(), *averaged)

    def _levels_of(self, hierarchy: Any) -> tuple[Transport, Transport]:
        """Return the ranks between nodes and those inside one; TypeError or ValueError if they are not to be had."""
        self.check_levels()
        if self.ranks.shards.count > 1:
            raise ValueError("hierarchy must be None where parameters are sharded: fully_shard is one already")
        return levels(hierarchy, self.ranks.transport, self.device)

    def check_levels(self) -> None:
        """Raise ValueError if this optimizer, as it is, can't work in two levels."""

    def set_up(self, block_size: int | None = None) -> None:
        """Make all that follows from parameters, options and ranks; ``block_size`` is a checkpoint's."""
        self.published: set[str] = set()  # names of entries of ``state`` that are ours
        alone, options = self.ranks.transport.world_size == self.ranks.shards.count == 1, self.options
        how = self.device, alone, options.nonfinite, options.capturable
        self.steps = Steps(type(self).__name__, self.parameters.owners, *how)
        _ = self.ranks.rows  # all ranks make it
        self.given_block_size = block_size
        self.expected_header: tuple[Mapping[str, Any] | None] | None = None  # the header of one about to be loaded
        self.just_loaded = False  # a checkpoint, and no step was taken since
        self.build()
        self._built = True

    def build(self) -> None:
        """Lay out the parameters and allocate all state; also anew after ``add_param_group``."""
        plist, device = self.parameters, self.device
        self.layout = self._laid_out()
        self._launch_tables = tables_of(self.layout, device)  # kept, because launches share what somebody keeps
        self.put_live(self.active_mask())
        self.allocate()
        self.steps.allocate(len(plist))
        self.hyper.forget()
        self.hyper.keep_rates(self.param_groups)
        self.coefficients = self._make_table()
        self.take_hyper_parameters()
        self._phase = next(iter(self.phases))
        self.steps.begin_anew()
        self.publish_state()

    def _make_table(self, **options: Any) -> CoefficientTable:
        """Make what computes coefficients."""
        group_of, corrected = self.parameters.group_of, self.options.bias_correction
        options["linear"] = self.linear
        return CoefficientTable(group_of, self.device, corrected, self.columns, self.hyper.rates, **options)

    def allocate(self) -> None:
        """Make the tensors that are declared, and room for corrections."""
        self.parameters.lay_out(self.layout)
        for spec in self.kept:
            spec.allocate(self, self.layout, self.device)

    def _laid_out(self) -> FlatLayout:
        """Return the flat index space; as long for each shard, so that checkpoints are rectangular."""
        sizes, chunks = self.parameters.sizes, self.ranks.transport.world_size * self.options.bucket_count
        given = self.options.block_size or self.given_block_size
        block_size = given or choose_block_size(sizes, chunks)
        if self.ranks.shards.count == 1:
            return FlatLayout(sizes, chunks, block_size)
        if given is None:
            block_size = -int(self.ranks.shards.max(torch.tensor([-block_size], device=self.device)))
        blocks = torch.tensor([FlatLayout(sizes, chunks, block_size).n_blocks], device=self.device)
        return FlatLayout(sizes, chunks, block_size, int(self.ranks.shards.max(blocks)))

    def put_live(self, live: LiveTable) -> None:
        """Let these elements count, and tell ops so."""
        self.live, self.places = live, Places.of(self.layout, self._launch_tables.tensor, live)

    def active_mask(self, excluded: Sequence[int] = ()) -> LiveTable:
        """Return which elements count: those no mask keeps still, of tensors that are not excluded."""
        masks = {}
        for i, (owner, p) in enumerate(zip(self.parameters.owners, self.parameters.params, strict=True)):
            if owner in self.masks:
                ordered = torch.empty_strided(p.shape, self.parameters.dense[i].stride(), dtype=torch.bool)
                masks[i] = ordered.copy_(local(self.masks[owner])).as_strided((p.numel(),), (1,))
        return live_table(self.layout, masks, excluded).to(self.device)

    def part_of(self, spec: StateSpec, i: int) -> Tensor:
        """Return what is kept of parameter ``i``'s elements, of its shape: where it is kept, but for codes.

        Of a part or a chunk of the flat index space, all that is here.
        """
        kept = spec.tensor(self)
        return self.parameters.shaped(kept, i, self.layout.offset(i)) if spec.per == "element" else kept

    def keep_part(self, spec: StateSpec, i: int, part: Tensor) -> None:
        """Keep ``part``, which is what ``part_of`` has returned, and was filled."""

    def publish_state(self) -> None:
        """Put views of the flat buffers into ``self.state``, under torch's names; leave what others keep there."""
        shown = [spec for spec in self.kept if spec.per == "element" and spec.shown(self.compressed)]
        found = {spec.name: spec.tensor(self) for spec in shown if spec.applies(self, self.compressed)}
        visible = {name: tensor for name, tensor in found.items() if tensor.dtype is not torch.uint8}  # no codes
        before, self.published = self.published, {"step", "master", *visible}
        for i, p in enumerate(self.parameters.owners):
            parts = {name: self.parameters.shaped(flat, i, self.layout.offset(i)) for name, flat in visible.items()}
            if i in self.parameters.masters:
                parts["master"] = self.parameters.dense[i]
            views = {name: self.parameters.published(part, i) for name, part in parts.items()}
            others = {name: value for name, value in self.state.get(p, {}).items() if name not in before}
            self.state[p] = {**others, "step": self.steps.of_each[i], **views}

    # ---------------------------------------------------------------- agreement

    def values_of_replicas(self) -> list[Fact]:
        """Return checksums of the parameters that model-parallel ranks have alike."""
        return self.parameters.values([i for i, shared in enumerate(self.parameters.replicas) if shared])

    def _agree_on_everything(self, error: Exception | None, broadcast: bool = False) -> None:
        """Return on all ranks if all mean the same and none has an ``error``; else raise on all.

        Values come last. Those of different shards differ; all else they have in common.
        """
        facts = [] if error else self._facts()
        names = [] if error else self.parameters.names
        of_a_shard = {what for name in names for what in (name, f"the mask of {name}")}
        of_all = [fact for fact in facts if fact[0] not in of_a_shard]
        of_model = [(what, fact) for what, fact in facts if what == "the optimizer" or what in self.options.names()]
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
        """Compare parameters as ``_agree_on_values``, in the first step after a load: models may be loaded later.

        Nothing to do for one rank alone; nor within a round, where each rank has parameters of its own, and will take
        those of the round's beginning, on which all have agreed while they loaded.
        """
        if self.ranks.transport.world_size * self.ranks.model_parallel.count > 1 and self.synchronised:
            self._agree_on_values(
                "the checkpoint's model must be loaded alike on every rank. This was found at the first step after "
                "load_state_dict(), and no parameter was changed"
            )

    def _facts(self) -> list[Fact]:
        """Return everything but values that must be equal on all ranks."""
        options, plist = self.options, self.parameters
        groups = [
            (f"{key} of group {i}", repr(value.tolist() if isinstance(value := group[key], Tensor) else value))
            for i, group in enumerate(map(numbers, self.param_groups))
            for key in self.hyper.names
        ]
        checksums = {p: f"checksum {checksum(local(mask).contiguous())}" for p, mask in self.masks.items()}
        named = list(zip(plist.owners, plist.names, strict=True))
        return [
            ("the optimizer", type(self).__name__),
            *((name, stated(getattr(options, name))) for name in options.names()),
            ("the number of ranks of a node", str(self.ranks.inside.world_size)),
            ("the number of model-parallel ranks", str(self.ranks.model_parallel.count)),
            *plist.facts(),
            ("the number of groups", str(len(self.param_groups))),
            *((f"the group of {name}", str(n)) for name, n in zip(plist.names, plist.group_of, strict=True)),
            *groups,
            *((f"the mask of {name}", checksums.get(p, "none")) for p, name in named),
        ]

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before any variance is frozen. Every rank must call it.

        Raises:
            RuntimeError: in the compression stage.
            ValueError: for bad hyper-parameters, or if ranks add different groups.
        """
        if not self._built:
            self._add_group(param_group)
            self.check_group(numbers(self.param_groups[-1]), f"group {len(self.param_groups) - 1}")
            return
        if self._phase == "compression":
            raise RuntimeError(
                "add_param_group must be called before the freeze: the layout is fixed in the compression stage; "
                "construct a new optimizer"
            )
        self.steps.refuse_if_broken()
        self.catch_up()
        with SignalsWait():
            self._add_to_built(param_group)

    def _add_to_built(self, param_group: dict[str, Any]) -> None:
        self.parameters.refresh_masters()
        kept = {
            p: {k: v.clone() for k, v in self.state[p].items() if k in self.published} for p in self.parameters.owners
        }
        coded = [spec for spec in self.specs() if spec.per == "element" and spec.tensor(self).dtype is torch.uint8]
        decoded = {id(p): [self.part_of(s, i) for s in coded] for i, p in enumerate(self.parameters.owners)}
        specs = [spec for spec in self.specs() if spec.per == "tensor"]
        tables = {id(p): [spec.tensor(self)[..., i] for spec in specs] for i, p in enumerate(self.parameters.owners)}
        masters = {id(self.parameters.owners[i]): self.parameters.master(i) for i in self.parameters.corrected}
        before = self.parameters, list(self.param_groups)
        outcomes, updates = self.steps.outcomes, self.steps.updates
        try:
            self._agree_on_everything(failure(lambda: self._take_group(param_group)))
        except BaseException:
            self.parameters, self.param_groups = before
            raise
        with self.steps.whole("add_param_group()"):
            self.given_block_size = None  # a checkpoint's was for the old groups; who has loaded none chooses anew
            self.build()
            self.steps.outcomes, self.steps.updates = outcomes, updates
            for i, p in enumerate(self.parameters.owners):
                for spec, column in zip(specs, tables.get(id(p), ()), strict=False):
                    spec.tensor(self)[..., i] = column
                for spec, part in zip(coded, decoded.get(id(p), ()), strict=False):
                    self.keep_part(spec, i, part)
                if id(p) in masters:
                    self.parameters.load_master(i, masters[id(p)])
            for p, state in kept.items():
                for key, value in state.items():
                    self.state[p][key].copy_(value)

    def _take_group(self, param_group: dict[str, Any]) -> None:
        self._add_group(materialise_group(param_group))
        for i, group in enumerate(self.param_groups):  # all: laid out anew, no step sees what was changed before
            self.check_group(numbers(group), f"group {i}")
        self._keep_rates()
        self.take_parameters()
        self._check_16_bits()

    def _add_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        where = f"group {len(self.param_groups) - 1}"
        check_keys(self.param_groups[-1], where, type(self).__name__, self.hyper.names, self.settings)

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        """Raise ValueError for the first hyper-parameter of a group that makes no sense."""
        check_group(group, name)

    def take_hyper_parameters(self) -> None:
        """Take the groups' hyper-parameters, where they were changed, for the steps that follow."""
        self._keep_rates()
        self.hyper.take(self.param_groups, self.check_group)

    def _keep_rates(self) -> None:
        self.hyper.keep_rates(self.param_groups)
        self.coefficients.lr = self.hyper.rates

    # ---------------------------------------------------------------- what it keeps

    @property
    def phase(self) -> Phase:
        """Return the stage of the last step taken: ``"uncompressed"``, or ``"warmup"``, then ``"compression"``.

        Of optimizers that agree in rounds: ``"uncompressed"``, ``"one-bit"``, or ``"local"`` between them.
        """
        return self._phase

    @property
    def compressed(self) -> bool:
        """Return whether it keeps what is declared for the "compressed" stage."""
        return self.phases.get(self.phase, False)

    def specs(self, compressed: bool | None = None) -> list[StateSpec]:
        """Return the declarations that apply, in this stage or in another."""
        compressed = self.compressed if compressed is None else compressed
        return [spec for spec in self.kept if spec.applies(self, compressed)]

    def wrote(self, header: Mapping[str, Any]) -> bool:
        """Return whether an optimizer of the same class has written a checkpoint, on ranks that it tells of."""
        return header.get("algorithm") == type(self).__name__ and "world_size" in header

    @property
    def synchronised(self) -> bool:
        """Return whether all ranks have the same parameters now."""
        return True

    def cut(self) -> dict[str, int]:
        """Return by what the rows along the flat index space are ordered: ranks, buckets, ranks of a node."""
        inside = 1 if self.ranks.levels is None else self.ranks.levels[1].world_size
        return {"world_size": self.ranks.transport.world_size, "buckets": self.options.bucket_count, "inside": inside}

    def cut_alike(self, header: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint's rows are ordered by the same."""
        return all(header[key] == value for key, value in self.cut().items())

    def catch_up(self) -> None:
        """Wait until the host knows how all steps so far have ended; raises as ``step`` does."""
        self.steps.outcomes.catch_up(self._describe)

    def _describe(self, flag: Flag) -> str:
        """Return details of why a step was skipped."""
        raise NotImplementedError

    def settle(self) -> None:
        """Bring what is kept into the form in which it is saved."""

    def plain_state(self) -> dict[str, Any]:
        """Return the values of ``header_fields``."""
        return {key: attrgetter(field.at)(self) for key, field in self.header_fields.items() if field.at}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's stage can't be taken up."""

    def resume(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's stage, with all buffers that it needs, still empty; also its ``header_fields``."""
        for key, field in self.header_fields.items():
            if field.at and key in header:
                *parts, name = field.at.split(".")
                setattr(attrgetter(".".join(parts))(self) if parts else self, name, header[key])

    def resumed(self, header: Mapping[str, Any]) -> None:
        """Take note that the buffers are filled."""
