"""What all distributed optimizers share: construction, agreement, the step's frame, counters, checkpoints.

A subclass says with ``_exchange`` what ranks do with each other's gradients: ``averaging.AveragingOptimizer``
averages them, and ``compressing.CompressingOptimizer`` hands a reducer what is to be compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import CollectiveError, Flag, Transport, make_transport
from ..triton_kernels import Coef
from ..triton_kernels.tables import capturing, tables_of
from . import consensus, copies, inspection, step_op
from .handshake import ddp_averages, warn_of_averages
from .options import CoefficientTable, check_group, check_lr, numbers, read_once
from .outcome import Outcomes
from .params import ParameterList, first_device, first_mesh, materialise
from .scaling import SCALER_ATTRIBUTES
from .settings import NUMERICS, WIRE, Layerwise, Options, Params, Ranks, names_of
from .sharding import group_of
from .state import loading, saving
from .state.keeper import Keeper, Phase
from .state.rank_local import Rows
from .step_count import StepCount, as_word


class DistributedOptimizer(Keeper):
    """Skeleton of an optimizer over flat buffers; see the module's docstring and ``Lamb``."""

    settings: ClassVar[type[Options]] = Options
    """What the option objects are settled into; its other fields are further ``settings`` of the constructor."""

    # Makes GradScaler call step() on every rank, also where it found an inf: there it can be refused.
    _step_supports_amp_scaling = True

    columns: ClassVar[dict[Coef, str]] = {}
    """Hyper-parameters of a group that go into the coefficient table as they are."""

    sums_up = True
    """Whether a checkpoint gets checksums of its tensors; ``dcp`` makes them of what it writes."""

    compresses: ClassVar[bool] = True
    """Whether less is sent than DDP would send."""

    _built: bool = False
    _late_error: Exception | None = None
    exp_avg: Tensor

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        process_group: Ranks = None,
        **settings: Any,
    ) -> None:
        # Of a group; torch adds others to its own table.
        self.hyper_parameters = (*defaults, *self.settings.grouped)
        self.lr_tensors: list[Tensor] = []
        # From here to the agreement no rank may leave on its own: the others would wait for it.
        params, error = materialise(params)
        self.device = first_device(params)
        self.transport = make_transport(group_of(process_group), self.device)
        self.shards = consensus.shards_of(first_mesh(params), self.device)
        self.inside: Transport = self.shards.transport  # between ranks of one replica, or of one node
        wire = WIRE
        try:
            if error is not None:
                raise error
            self.options = options = self.settings.of(type(self).__name__, settings)
            options.check()
            wire = settings.get("wire", wire)
            defaults = defaults | {name: getattr(options, name) for name in options.grouped}
            self.check_group(numbers(defaults))
            super().__init__(params, defaults)
            # Of groups, torch's unflattening takes up only what is there: so a checkpoint's header is.
            self.param_groups[0][saving.KEY] = ""
            self.put_lr_on_the_device()
            self.parameters = ParameterList(self.param_groups, options.master_weights)
            consensus.check_shards(self)
            masks = settings.get("numerics", NUMERICS).mask or {}
            consensus.check_masks(masks, self.parameters)
            consensus.check_rounding(options.stochastic_rounding, self.parameters)
            self.masks = dict(masks)
            consensus.check_device(self.device)
            self.levels = consensus.levels_of(self, wire.hierarchy)
            self.inside = self.inside if self.levels is None else self.levels[1]
        except Exception as caught:
            error = caught
        consensus.agree_on_everything(self, error, wire.broadcast_parameters)
        self.set_up()

    # ---------------------------------------------------------------- construction

    def set_up(self, block_size: int | None = None) -> None:
        """Make all that follows from parameters, options and ranks; ``block_size`` is a checkpoint's."""
        self.published: set[str] = set()  # names of entries of ``state`` that are ours
        self.ddp_attached = False
        self.step_count = StepCount(self.parameters.owners, self.device if self.options.capturable else None)
        self.averaged_elsewhere: bool | None = None  # until the first step
        self.rows = Rows(self.transport, self.shards, self.device)
        _ = self.rows.mesh  # all ranks make it; later one may ask for a state_dict() alone
        self.given_block_size = block_size
        self.saving_group: dist.ProcessGroup | None = None  # over which ranks talk while they save in the background
        self.expected_header: tuple[Mapping[str, Any] | None] | None = None  # the header of one about to be loaded
        self.just_loaded = False  # a checkpoint, and no step was taken since
        self.build()
        self._built = True
        self.number = step_op.number_of(self)

    def check_levels(self) -> None:
        """Raise ValueError if this optimizer, as it is, can't work in two levels."""

    def build(self) -> None:
        """Lay out the parameters and allocates all state; also anew after ``add_param_group``."""
        plist, device = self.parameters, self.device
        self.layout = consensus.layout_of(self, self.transport.world_size * self.options.bucket_count)
        self._launch_tables = tables_of(self.layout, device)  # kept, because launches share what somebody keeps
        self._block_tensor = self._launch_tables.tensor
        self.live = consensus.live_of(self)
        self.allocate()
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        # Of each tensor, those in which some rank had a gradient of it. Floats, as torch's are; exact up to 2^53.
        self.own_steps = torch.zeros(len(plist), dtype=torch.float64, device=device)
        self._missing: tuple[int, ...] = ()  # tensors of which this rank has no gradient in this step
        self._absent: Tensor | None = None  # of which no rank has one: bool [tensors], or None: there are none
        self.coefficients = CoefficientTable(
            plist.group_of, device, self.options.bias_correction, self.columns, self.options.capturable
        )
        self._taken: list[dict[str, Any]] = []
        self.put_lr_on_the_device()
        self.take_hyper_parameters()
        self.nothing = torch.empty(0, device=device)
        self._phase = next(iter(self.phases))
        self.outcomes = Outcomes(device, self.options.nonfinite)
        self.outcomes.on_replays = self.step_count.replayed
        if self.options.capturable:
            self.outcomes.count_replays(device)
        self.overflowed = torch.zeros(1, device=device)
        self.last_grad_norm = torch.zeros((), device=device)
        self._begun = self.averaged = False
        self._step_number: int | Tensor = 0
        self.broken = ""
        self.publish_state()

    @property
    def _rounding(self) -> Tensor | None:
        """What the ops draw the random bits of stochastic rounding from; read on the device, equal on all ranks."""
        return self.updates if self.options.stochastic_rounding else None

    @property
    def _places(self) -> tuple[tuple[int, ...], int]:
        """Where tensors lie in the flat index space, for ops: their sizes, and the block size."""
        return self.layout.sizes, self.layout.block_size

    @property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each block's tensor, and which elements count, for ops."""
        return self._block_tensor, self.live.bits, self.live.row

    def publish_state(self) -> None:
        """Put views of the flat buffers into ``self.state``, under torch's names; leave what others keep there."""
        specs = [spec for spec in self.specs() if spec.per == "element" and spec.shown(self.compressed)]
        visible = {spec.name: spec.tensor(self) for spec in specs}
        before, self.published = self.published, {"step", "master", *visible}
        for i, p in enumerate(self.parameters.owners):
            parts = {name: self.parameters.shaped(flat, i, self.layout.offset(i)) for name, flat in visible.items()}
            if i in self.parameters.masters:
                parts["master"] = self.parameters.dense[i]
            views = {name: self.parameters.published(part, i) for name, part in parts.items()}
            others = {name: value for name, value in self.state.get(p, {}).items() if name not in before}
            self.state[p] = {**others, "step": self.own_steps[i], **views}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before any variance is frozen. Every rank must call it.

        Raises:
            RuntimeError: in the compression stage.
            ValueError: for bad hyper-parameters, or if ranks add different groups.
        """
        if not self._built:
            super().add_param_group(param_group)
            self.check_group(numbers(self.param_groups[-1]), f"group {len(self.param_groups) - 1}")
            return
        if self._phase == "compression":
            raise RuntimeError(
                "add_param_group must be called before the freeze: the layout is fixed in the compression stage; "
                "construct a new optimizer"
            )
        self._refuse_if_broken()
        consensus.add_group(self, param_group, super().add_param_group)

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        """Raise ValueError for the first hyper-parameter of a group that makes no sense."""
        check_group(group, name)
        for key in ("frozen_dtype", "freeze_step"):
            if key in group:
                raise ValueError(f"{key} holds for all groups, got {key}={group[key]!r} in {name}; pass it beside them")
        for key in group:
            if key in names_of(Layerwise) and key not in self.hyper_parameters:
                raise ValueError(
                    f"{key} is no hyper-parameter of {type(self).__name__}, got {key}={group[key]!r} in {name}"
                )

    def put_lr_on_the_device(self) -> None:
        """Keep, where capturable, learning rates in tensors that stay, as captured graphs read them again."""
        if not self.options.capturable:
            return
        for i, group in enumerate(self.param_groups):
            if i == len(self.lr_tensors):
                self.lr_tensors.append(torch.zeros((), device=self.device))
            if group["lr"] is not self.lr_tensors[i]:
                check_lr(group["lr"], f" in group {i}")
                self.lr_tensors[i].fill_(group["lr"])
                group["lr"] = self.lr_tensors[i]

    def take_hyper_parameters(self) -> None:
        """Check the groups' hyper-parameters where they were changed; a bad one leaves the last good ones."""
        for i, group in enumerate(self.param_groups):
            read_once(group)
            # These alone: a scheduler keeps tensors of its own in a group, and reading one waits for the device.
            taken = numbers({key: group[key] for key in self.hyper_parameters})
            if isinstance(group["lr"], Tensor) and not self.options.capturable:
                check_lr(group["lr"], f" in group {i}")  # it may have been filled in place
            if i == len(self._taken):
                self._taken.append(taken)
            elif not _same(taken, self._taken[i]):
                self.check_group({**group, **taken}, f"group {i}")
                self._taken[i] = taken

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average over the ranks and update the parameters. Every rank must call it equally often.

        A parameter whose gradient is None on all ranks stays as it is, with all its state, as in torch; where it is
        None on some ranks only, it counts as zeros there.

        Args:
            closure: Evaluates the model again and returns the loss.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``, on every rank.
            AbortedStepError, OutOfStepError: on every rank. After any of these parameters and step
                counts are as before; compressing optimizers keep the gradients as residual.
            CollectiveError: if a rank died or hangs; restart from a checkpoint.
            RuntimeError, TypeError, ValueError: if this rank's parameters or gradients can't be used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.parameters.owners:  # nothing trains yet: nobody meets, and no step is counted
            self.parameters.usable([], self.nothing)
            self._opt_called = True
            return loss
        grads = self.parameters.gradients(self.nothing)
        if torch.compiler.is_compiling():
            # What can be seen of tensors while they are traced the compiler guards from then on.
            torch.ops.fusedonebit.step(self.parameters.params, grads, self.number, self.parameters.fits(grads))
        else:
            self.take_step(grads)
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero. Those that no step has used count as a step that was skipped.

        Where one rank makes gradients for another purpose, such as a saliency map, drop them by ``model.zero_grad()``.
        """
        self.step_count.clear(self.parameters.owners)
        super().zero_grad(set_to_none)
        self.step_count.cleared(self.parameters.owners)

    # Schedulers replace ``step`` by a wrapper that notes the call, unless it says that they have; compilers refuse it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def take_step(self, given: Sequence[Tensor], params: Sequence[Tensor] | None = None, checked: bool = False) -> None:
        """Take a step on ``given`` gradients, maybe ``checked``, that updates ``params`` in the parameters' stead."""
        try:
            self._step_or_raise(given, params, checked)
        except Exception:
            self.step_count.forget()  # the same gradients may well be given again
            # A GradScaler removes what it has set only after a step that ends well.
            for name in SCALER_ATTRIBUTES:
                vars(self).pop(name, None)
            raise

    def _step_or_raise(self, given: Sequence[Tensor], params: Sequence[Tensor] | None, checked: bool) -> None:
        self._opt_called = True  # for schedulers
        self._refuse_if_broken()
        captured = self._captured()
        if not captured:
            self.outcomes.absorb_replays()
        self.begin_step(captured)
        self._step_number = self._take_number(None if params is None else given, captured)
        error: Exception | None = None
        try:
            self.put_lr_on_the_device()
            self.take_hyper_parameters()
            grads = given if checked else self.parameters.usable(given, self.nothing)
        except Exception as caught:
            # The others must not wait for this rank: it takes part, and says that it can't go on.
            grads, error = [self.nothing] * len(self.parameters), caught
        saw_averages = not captured and self._notice_averages(grads)
        # A rank that can't take the step says that it has all gradients: so no tensor is left out because of it.
        self._missing = () if error is not None else self.parameters.missing(grads)
        with self.parameters.standing_in(self.parameters.params if params is None else params):
            flags = self._synchronise_and_update(grads, error is not None, captured)
        self._advance(flags)
        error = self._error_due(error)
        if captured:
            self.outcomes.record_captured(flags)
        elif error is None:
            self.outcomes.record(flags, self._describe)
        else:
            self.outcomes.record_own_failure(flags)
        if error is not None:
            self.step_count.fail()
            raise error
        if saw_averages and self.transport.rank == self.shards.transport.rank == 0:
            warn_of_averages()

    def _notice_averages(self, grads: Sequence[Tensor]) -> bool:
        """Count what DDP without our hook has sent; return whether it has just been noticed, at the first step."""
        if self.ddp_attached:
            return False
        looking, ranks = self.averaged_elsewhere is None, self.transport.world_size
        if looking:
            self.averaged_elsewhere = self.compresses and ranks > 1 and ddp_averages(self.parameters.owners)
        if self.averaged_elsewhere:
            self.transport.traffic.add(2 * sum(g.nbytes for g in grads) * (ranks - 1) // ranks)  # as a ring sends them
        return looking and bool(self.averaged_elsewhere)

    def _take_number(self, compiled: Sequence[Tensor] | None, captured: bool) -> int | Tensor:
        """Count a step; return its number in messages. ``compiled``: the gradients that a compiler passes."""
        if captured:
            return self.step_count.capture()
        self._check_repeated(self.step_count.take(self.parameters.owners, compiled))
        return as_word(self.step_count.total)

    def _check_repeated(self, repeated: bool) -> None:
        """Raise RuntimeError if a step that this rank repeats can't tell the others of it."""

    def _refuse_if_broken(self) -> None:
        if self.broken:
            raise CollectiveError(f"this optimizer can't go on: {self.broken}")

    def _error_due(self, error: Exception | None) -> Exception | None:
        """Return what this step raises, if this rank had an error: all ranks know of it now."""
        late, self._late_error = self._late_error, None
        return error or late

    def _captured(self) -> bool:
        """Return whether a CUDA graph is being captured; raise RuntimeError if this step can't be."""
        if not capturing(self.device):
            return False
        if not self.options.capturable or self.options.nonfinite == "raise":
            raise RuntimeError(
                'a step can only be captured in a CUDA graph with Wire(capturable=True) and Faults(nonfinite="skip"): '
                "what changes from step to step must lie on the device; construct the optimizer so"
            )
        if self._phase != "compression":
            raise RuntimeError(
                f"a step can only be captured in the compression stage, not in {self._phase!r}: take uncaptured steps "
                'until optimizer.phase == "compression"'
            )
        if self.just_loaded:
            raise RuntimeError(
                "the first step after load_state_dict() can't be captured in a CUDA graph, since ranks compare their "
                "parameters in it: take an uncaptured step first"
            )
        return True

    def begin_step(self, captured: bool = False) -> None:
        """Enter the stage of the coming step, once; DDP's hook may come before ``step``."""
        if self._begun:
            return
        if not captured:
            with self._breaking():
                if self.just_loaded:
                    consensus.agree_on_loaded(self)
                self.just_loaded = False
        self.transport.traffic.start_step()
        self.inside.traffic.start_step()
        if not captured:
            with self._breaking():
                self._enter_phase()
        self._begun = True

    def _enter_phase(self) -> None:
        """Change the stage if it is time; the same on all ranks."""

    def _synchronise_and_update(self, grads: Sequence[Tensor], abort: bool, captured: bool) -> Tensor:
        self._absent = None
        try:
            coef = self.coefficient_table()
            self.outcomes.attempts += not captured
            with self._breaking(begun=not captured):
                self.parameters.before_update()
                flags = self._exchange(grads, coef, abort)
                self.parameters.after_update()
                return flags
        finally:
            self._begun = self.averaged = False

    @contextmanager
    def _breaking(self, begun: bool = False) -> Iterator[None]:
        """Refuse all further steps once a collective has failed: half an exchange may be done."""
        try:
            yield
        except CollectiveError as failure:
            self.outcomes.attempts -= begun  # it was none
            self.broken = f"after {self.outcomes.updates} updates, {failure}"
            raise CollectiveError(self.broken) from failure

    def coefficient_table(self) -> Tensor:
        """Return the coefficients of the coming step, float32 [tensors, columns of ``Coef``]."""
        return self.coefficients(self._taken, self.own_steps)

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Exchange with the other ranks and update; return the step's flags, int32 [1]."""
        raise NotImplementedError

    def _advance(self, flags: Tensor) -> None:
        """Count the update, unless it was skipped; of tensors only those of which some rank had a gradient."""
        taken = flags[0] == 0
        self.updates += taken
        self.own_steps += taken if self._absent is None else taken & ~self._absent

    def catch_up(self) -> None:
        """Wait until the host knows how all steps so far have ended; raises as ``step`` does."""
        self.outcomes.catch_up(self._describe)

    @property
    def _tag_of_shards(self) -> int:
        """What ranks with other shards must have alike: hyper-parameters and the number of steps, 31 bits."""
        return (self.coefficients.tag ^ self.step_count.total) & 0x7FFFFFFF

    def _describe(self, flag: Flag) -> str:
        """Return details of why a step was skipped."""
        raise NotImplementedError

    def _say_where(self, what: str) -> str:
        here = "; ".join(", ".join(f"{k}={group[k]}" for k in self.hyper_parameters) for group in self.param_groups)
        return f"{what}. On rank {self.transport.rank}, in its step {self.step_count.total}: {here}"

    def __getstate__(self) -> dict[str, Any]:
        return copies.pickled(self)

    def __setstate__(self, content: dict[str, Any]) -> None:
        copies.unpickle(self, content)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        return copies.deep_copy(self, memo)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied by copy.copy: two optimizers would move the same parameters, each "
            "with a state of its own; use copy.deepcopy, of (model, optimizer) to keep them together"
        )

    # ---------------------------------------------------------------- what users look at

    @property
    def phase(self) -> Phase:
        """The stage of the last step taken: ``"uncompressed"``, or ``"warmup"``, then ``"compression"``.

        Of optimizers that agree in rounds: ``"uncompressed"``, ``"one-bit"``, or ``"local"`` between them.
        """
        return self._phase

    @property
    def averages_gradients(self) -> bool:
        """Whether the coming step uses averages of the ranks' gradients; else DDP must leave them alone."""
        return not self.compressed

    def stats(self) -> dict[str, Any]:
        """Return where training stands. Waits for the device.

        Returns:
            phase; step (updates done); skipped_steps; backend; transport; world_size; parameters and
            padding (elements); collectives_step, bytes_step and bytes_total (sent by this rank to
            others, with what DDP sends if it averages, attached or not); averaged_already (whether DDP averages
            gradients that were to be compressed, without ``ddp.attach``); collectives_inside and bytes_inside (of the
            last step, between ranks that hold other shards, or are of one node); state_bytes (allocated); freeze_step
            (None); grad_norm (before clipping, of the last step; None without ``max_grad_norm``).
        """
        return inspection.stats(self)

    def _layer_stats(self) -> dict[str, list[Any]]:
        """Return what ``stats(layers=True)`` of a subclass tells of layers: one entry per tensor each."""
        return {"name": list(self.parameters.names)}

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, equal on all ranks, float32 of its shape."""
        i = self._index(param)
        return self.parameters.shaped(self.exp_avg, i, self.layout.offset(i)).clone()

    def _index(self, param: Tensor) -> int:
        for i, p in enumerate(self.parameters.owners):
            if p is param:
                return i
        raise ValueError(f"param must be a trainable parameter of this optimizer, got shape {tuple(param.shape)}")

    def __repr__(self) -> str:
        return inspection.describe(self, super().__repr__(), self._described())

    def _described(self) -> list[str]:
        """Return lines of a subclass for ``repr``: what it alone can be told."""
        own = [name for name in self.options.told if name not in Options.told]
        return [f"{name}: {getattr(self.options, name)}" for name in own]

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors and plain values only. See ``checkpoint``, and ``dcp``.

        Raises:
            CollectiveError: after a step that ended so: half an exchange is no state to go on from.
        """
        self._refuse_if_broken()
        saving.call_hooks(self, "state_dict_pre")
        saved = saving.save(self) if self.expected_header is None else saving.template(self, *self.expected_header)
        if not self._optimizer_state_dict_post_hooks:
            return saved
        return saving.seal_again(self, saving.call_hooks(self, "state_dict_post", saved))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from ``state_dict`` of this optimizer or of ``torch.optim.AdamW``; all ranks call it.

        Raises:
            ValueError: on every rank, if the checkpoint is of another model, or, where each rank has a
                file of its own, of another world size or rank; nothing was changed.
            Exception: what a hook raises, on its rank; the others raise ``DisagreementError``.
        """
        loading.load(self, state_dict)


def _same(taken: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    # Tensors are the same or not: comparing values would wait for the device.
    def same(a: Any, b: Any) -> bool:
        return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)

    return taken.keys() == before.keys() and all(same(taken[key], before[key]) for key in taken)
