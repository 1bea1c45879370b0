"""The frame of a step, which all optimizers share; its ``Algorithm`` says what ranks do with each other's gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..comm import make_transport
from ..triton_kernels import backend
from . import copies, step_op
from .algorithm import Algorithm
from .arguments import check_keys, settling
from .contents import Contents
from .first_contact import NOTHING_TRAINS, introduce
from .frame import Frame
from .header import KEY
from .hyper_parameters import HyperParameters
from .inputs import first_device, first_mesh, materialise, materialise_group
from .interrupts import SignalsWait
from .options import check_group, numbers
from .scaling import NO_SCALE, SCALER_ATTRIBUTES, LossScale
from .settings import NUMERICS, WIRE, Params, Ranks
from .sharding import group_of, model_ranks
from .state import growing, loading, saving
from .stepping import Stepping
from .traits import Phase
from .world import World

SHOWN_WHERE_ON = ("max_grad_norm", "master_weights", "stochastic_rounding", "capturable")
"""Options that ``repr`` only shows where they are on."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Skeleton of an optimizer: a subclass is a signature, its documentation, and the ``kind`` of its algorithm.

    Attributes:
        frame: What it has whatever its algorithm: parameters, ranks, options, counts.
        algorithm: What it does in a step, and carries to the next.
    """

    # Makes GradScaler call step() on every rank, also where it found an inf: there it can be refused.
    _step_supports_amp_scaling = True

    kind: type[Algorithm] = Algorithm
    """Of its algorithm."""

    algorithm: Algorithm

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let constructors say where an argument belongs that Python would only call unexpected."""
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls):
            cls.__init__ = settling(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self, params: Params, defaults: dict[str, Any], *, process_group: Ranks = None, **settings: Any
    ) -> None:
        # From here to the agreement no rank may leave on its own: the others would wait for it.
        params, error = materialise(params)
        device = first_device(params)
        transport, wire = make_transport(group_of(process_group), device), WIRE
        parts = model_ranks(getattr(settings.get("wire"), "model_parallel", None), device)
        frame = self.frame = Frame(self, World(transport, device, parts, None if parts else first_mesh(params)))
        try:
            if error is not None:
                raise error
            frame.options = options = self.kind.traits.settings.of(frame.name, settings)
            options.check()
            # Of a group; torch adds others to its own table.
            names = (*defaults, *options.grouped)
            frame.hyper = HyperParameters(names, device, options.wire.capturable)
            wire = settings.get("wire", wire)
            if wire.hierarchy is None and wire.hierarchy_dtype is not torch.float32:
                got = f"got {wire.hierarchy_dtype!r}"
                raise ValueError(f"hierarchy_dtype must be torch.float32 without Wire(hierarchy=...), {got}")
            values = options.values()
            defaults = defaults | {name: values[name] for name in options.grouped}
            self.check_group(numbers(defaults))
            super().__init__(params, defaults)
            # Of groups, torch's unflattening takes up only what is there: so a checkpoint's header is.
            self.param_groups[0][KEY] = ""
            frame.hyper.keep_rates(self.param_groups)
            frame.take_parameters()
            self.kind.check(frame)
            frame.check_options(settings.get("numerics", NUMERICS), wire)
        except Exception as caught:
            error = caught
        frame.agree_on_everything(error, wire.broadcast_parameters)
        self.set_up()
        self.algorithm.begin(settings)
        introduce(frame, self._chosen(), process_group)

    # ---------------------------------------------------------------- construction

    @property
    def title(self) -> str:
        """Return what it is called, in checkpoints as well: those of another title it can't go on from."""
        return type(self).__name__

    def set_up(self) -> None:
        """Make all that follows from parameters, options and ranks; begin the checks of first steps anew."""
        self.published: set[str] = set()  # names of entries of ``state`` that are ours
        self.stepping = Stepping(self.frame)
        self.frame.set_up()
        self.build()
        self.number = step_op.number_of(self)

    def build(self) -> None:
        """Lay out the parameters and allocate all state; also anew after a load, or ``add_param_group``."""
        self.frame.build(self.kind.traits.columns, self.kind.traits.linear)
        self.take_hyper_parameters()
        if self.is_built:
            self.algorithm.close()  # before another is allocated
        self.algorithm = self.kind(self.frame)
        self.contents = Contents(self.algorithm)
        self.publish_state()

    @property
    def is_built(self) -> bool:
        """Tell whether all is laid out: torch's constructor adds groups before."""
        return "algorithm" in vars(self)

    def publish_state(self) -> None:
        """Put views of what is kept into ``self.state``, under torch's names; leave what others keep there."""
        self.published = growing.publish(self.state, self.frame, self.contents.kept(), self.published)

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Every rank must call it, between two steps, as long as its parameters can get a variance.

        With a compression stage that is before the warm-up ends (and not after a warm start, or a re-warm-up);
        ``MarsitSGD`` and ``MarsitAdam``: between two rounds, without a hierarchy; ``OneBitLion``, and ``ZeroOneAdam``
        with a ``sync_policy`` alone: before the first step; with a ``variance_policy`` before the first round of bits.

        Raises:
            RuntimeError: where it is too late, or a backward pass has begun a step.
            ValueError: for bad hyper-parameters, or if ranks add different groups.
        """
        if not self.is_built:
            self._add_group(param_group)
            self.check_group(numbers(self.param_groups[-1]), f"group {len(self.param_groups) - 1}")
            return
        self.algorithm.check_idle("add_param_group()")
        self.algorithm.check_growth()
        self.frame.steps.refuse_if_broken()
        self.algorithm.catch_up()
        with SignalsWait():
            growing.grow(self, lambda: self._take_group(param_group))

    def _take_group(self, param_group: dict[str, Any]) -> None:
        self._add_group(materialise_group(param_group))
        for i, group in enumerate(self.param_groups):  # all: laid out anew, no step sees what was changed before
            self.check_group(numbers(group), f"group {i}")
        self.algorithm.check_groups([numbers(group) for group in self.param_groups])
        self._keep_rates()
        self.frame.take_parameters()
        self.frame.check_16_bits(self.kind.traits.corrects)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        where, frame = f"group {len(self.param_groups) - 1}", self.frame
        check_keys(self.param_groups[-1], where, frame.name, frame.hyper.names, frame.options)

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        """Raise ValueError for the first hyper-parameter of a group that makes no sense."""
        check_group(group, name)
        self.frame.options.check_group(group, name, self.frame.ranks.transport.world_size)

    def take_hyper_parameters(self) -> None:
        """Take the groups' hyper-parameters, where they were changed, for the steps that follow."""
        if self.frame.options.wire.capturable:
            self._keep_rates()
        algorithm = getattr(self, "algorithm", None)  # the first one looks at groups when it is made
        self.frame.hyper.take(self.param_groups, self.check_group, algorithm and algorithm.check_groups)

    def _keep_rates(self) -> None:
        self.frame.hyper.keep_rates(self.param_groups)
        self.frame.coefficients.lr = self.frame.hyper.rates

    # ---------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average over the ranks and update the parameters. Every rank must call it equally often.

        A parameter whose gradient is None on all ranks stays as it is, with all its state, as in torch; where it is
        None on some ranks only, it counts as zeros there.

        Args:
            closure: Evaluates the model again and returns the loss.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``, on every rank.
            AbortedStepError, OutOfStepError: on every rank, if one had an error, or they disagree about the step.
                After these three, parameters and step counts are as before; compressing optimizers keep the gradients
                as residual.
            CollectiveError: if a rank died or hangs, or if an exception has ended an earlier step while it was changing
                parameters; restart from a checkpoint. An exception before or after that leaves the step undone or
                complete. Ctrl-C, or what another signal's handler raises, waits until the step is complete; a second
                signal does not wait.
            RuntimeError, TypeError, ValueError: if this rank's parameters or gradients can't be used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plist, nothing = self.frame.parameters, self.frame.nothing
        if not plist.owners:  # nothing trains yet: nobody meets, and no step is counted
            plist.usable([], nothing)
            self._opt_called = True
            self.stepping.first_steps.say(self.frame, [NOTHING_TRAINS.format(self.frame.name)])
            return loss
        if torch.compiler.is_compiling():
            with torch.no_grad():
                # What can be seen of tensors while they are traced the compiler guards from then on.
                grads = plist.gradients(nothing)
                torch.ops.fusedonebit.step(plist.params, grads, self.number, plist.fits(grads))
            return loss
        with SignalsWait(), torch.no_grad():  # a signal within no_grad() would leave gradients off for good
            self.take_step(plist.gradients(nothing))
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero. Those that no step has used count as a step that was skipped.

        Where one rank makes gradients for another purpose, such as a saliency map, drop them by ``model.zero_grad()``.
        Averages that DDP has made are dropped on all ranks, or on none.

        Raises:
            OutOfStepError: if others take the step on such averages; no gradient was dropped.
            RuntimeError: if ``Wire(release_gradients=True)`` has already used some.
        """
        self.algorithm.check_idle("zero_grad()")
        if self.frame.under_ddp.averaged:
            self.algorithm.stage.drop_averages()
        with SignalsWait():
            count, owners = self.frame.steps.count, self.frame.parameters.owners
            count.clear(owners)
            super().zero_grad(set_to_none)
            count.cleared(owners)

    # Schedulers replace ``step`` by a wrapper that notes the call, unless it says that they have; compilers refuse it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def take_step(self, given: Sequence[Tensor], params: Sequence[Tensor] | None = None, checked: bool = False) -> None:
        """Take a step on ``given`` gradients, maybe ``checked``, that updates ``params`` in the parameters' stead.

        Signals wait meanwhile; the caller sees to that.
        """
        self.frame.loss_scale = NO_SCALE if vars(self).keys().isdisjoint(SCALER_ATTRIBUTES) else LossScale.of(self)
        self.algorithm.check_step()
        self._opt_called = True  # for schedulers
        try:
            self.stepping.take(self, self.contents, given, params, checked)
        except BaseException as error:
            if self.frame.steps.end_early(error):
                self.frame.coefficients.forget()
            # A GradScaler removes what it has set only after a step that ends well.
            for name in SCALER_ATTRIBUTES:
                vars(self).pop(name, None)
            raise

    def begin_step(self) -> None:
        """Enter the stage of the coming step, once, before ``step`` does: as DDP's hook."""
        with SignalsWait():
            self.stepping.begin(self, self.contents)

    # ---------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        return copies.pickled(copies.content_of(self), self.frame.ranks)

    def __setstate__(self, content: dict[str, Any]) -> None:
        copies.unpickle(self, content)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedOptimizer:
        copied: DistributedOptimizer = copies.deep_copy(self, self.frame.ranks, memo)
        return copied

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied by copy.copy: two optimizers would move the same parameters, each "
            "with a state of its own; use copy.deepcopy, of (model, optimizer) to keep them together"
        )

    # ---------------------------------------------------------------- what users look at

    @property
    def phase(self) -> Phase:
        """Return the stage of the last step taken: ``"uncompressed"``, or ``"warmup"``, then ``"compression"``.

        Of optimizers that agree in rounds: ``"uncompressed"``, ``"one-bit"``, or ``"local"`` between them.
        """
        return self.algorithm.phase

    @property
    def averages_gradients(self) -> bool:
        """Tell whether the coming step uses averages of the ranks' gradients; else DDP must leave them alone."""
        return self.algorithm.coming_stage.averages_gradients

    @property
    def synchronised(self) -> bool:
        """Return whether all ranks have the same parameters now: not within a round of workers' own steps."""
        return self.algorithm.synchronised

    @property
    def last_grad_norm(self) -> Tensor:
        """Return the norm of the last step's gradients before clipping, in memory of its own, without waiting.

        Float32 []; 0 without ``max_grad_norm``.
        """
        return self.frame.scaling.norm.clone()

    def stats(self, layers: bool = False) -> dict[str, Any]:
        """Return where training stands. Waits for the device.

        Args:
            layers: Look at every layer, too, at no more cost than a few sums per block of it, with LAMB one read of the
                variance.

        Returns:
            phase; step (updates done); skipped_steps; partial_steps (those of this process, but for replays of CUDA
            graphs, in which elements alone were left out whose gradient was no number, or too large); backend;
            transport; world_size; parameters and padding (elements); collectives_step, bytes_step and bytes_total (sent
            by this rank to others, with what DDP sends if it averages, attached or not); averaged_already (whether DDP
            averages gradients that were to be compressed, without ``ddp.attach``); collectives_inside and bytes_inside
            (of the last step, between ranks that hold other shards or parts, or are of one node); state_bytes
            (allocated); freeze_step (updates before the last freeze, None before the first); grad_norm (before
            clipping, of the last step; None without ``max_grad_norm``).

            Of what compresses also wire_bytes (what only serves within a step). With a compression stage: rewarms;
            vetoed_steps (of those skipped); update_norm (of the last compressed update, divided by the learning rate)
            and update_norm_limit (the guard's); worker_error_norm (this rank's residual), server_error_norm (of the
            chunk it serves) and compensated_norm (of what was compressed), all three 0 in the warm-up and in the unit
            in which things are compressed; residual_over_momentum (of the last compressed step, see
            ``CompressedAllReduce.residual_ratio``); dead_tensors (names; of a shared variance those that wait for a
            gradient); dead_coordinates (with v == 0 at the freeze, in other tensors); renewals (of a shared variance).

            In rounds: rounds (synchronisations) and local_steps (done in this round); ``ZeroOneAdam`` also renewals (of
            the variance, among them), round_steps (its length), and the norms above, of the last synchronisation in
            bits.

            With ``layers`` also "layers", lists with one entry per tensor: name; with a compression stage
            residual_over_momentum (of this rank's residual, of sharded parameters and of nodes' parts what is here); of
            LAMB coefficient (c of the last step),
            average (c_avg), ratio (r; 1 while nothing is compressed) and variance_norm (the 2-norm of the variance that
            follows the gradients, after the freeze the fresh one; of sharded parameters that of this rank's shard), as
            in 1-bit LAMB's figures 1 to 3.
        """
        told = self.contents.report()
        return told | {"layers": self.contents.layer_stats()} if layers else told

    def owed(self) -> float:
        """Return the norm of what compression has left out so far, over that of the last update; waits for the device.

        0 where nothing is left out; infinite where there was no update to compare with, as after a skipped step.
        """
        return self.algorithm.owed()

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, float32 of its shape.

        Equal on all ranks, but for optimizers whose workers have momenta of their own. In a round of ``ZeroOneAdam``
        it is that of the last synchronisation: what is left of newer ones is in ``worker_error``.
        """
        return self.algorithm.momentum(param)

    def __repr__(self) -> str:
        options = self.frame.options.values()
        lines = [
            f"phase: {self.phase}, {self.frame.steps.outcomes.updates} updates",
            *self._chosen(),
            *(f"{name}: {options[name]!r}" for name in SHOWN_WHERE_ON if options[name]),
        ]
        groups = super().__repr__().split("\n", 1)[1]
        return "\n".join([f"{type(self).__name__} (", *lines, groups])

    def _chosen(self) -> list[str]:
        """Return lines that say what was chosen, by the user or for want of a choice."""
        return [
            *self.algorithm.described(),
            f"block_size: {self.frame.layout.block_size}",
            f"backend: {backend(self.frame.device)}",
            f"transport: {self.frame.ranks.transport!r}",
        ]

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors and plain values only; see ``core.state.saving``, and ``dcp``.

        ``OneBitMuon``'s gathers what owners have: all ranks must call it.

        Raises:
            CollectiveError: after a step that ended so, or was interrupted while it changed parameters: half a step is
                no state to go on from.
        """
        frame, contents = self.frame, self.contents
        frame.steps.refuse_if_broken()
        saving.call_hooks(self, "state_dict_pre")
        if frame.expected_header is None:
            saved = saving.save(self)
        else:
            packed = saving.packed_of(self.param_groups, self.state)
            saved = saving.template(frame, contents.kept, packed, *frame.expected_header)
        if not self._optimizer_state_dict_post_hooks:
            return saved
        return saving.seal_again(frame, contents.declared(), saving.call_hooks(self, "state_dict_post", saved))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from ``state_dict`` of this optimizer or of ``torch.optim.AdamW``; all ranks call it.

        Raises:
            ValueError: on every rank, if the checkpoint is of another model, or, where each rank has a
                file of its own, of another world size or rank; nothing was changed.
            Exception: what a hook raises, on its rank; the others raise ``DisagreementError``.
        """
        loading.load(self, state_dict)


def frame_of(optimizer: object) -> Frame | None:
    """Return what an optimizer of this package works with; None of another."""
    return optimizer.frame if isinstance(optimizer, DistributedOptimizer) else None
