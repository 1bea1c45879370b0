"""The frame of a step, which all distributed optimizers share; ``state.keeper`` has what is there between two steps.

A subclass says with ``_exchange`` what ranks do with each other's gradients: ``averaging.AveragingOptimizer``
averages them, and ``compressing.CompressingOptimizer`` hands a reducer what is to be compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.agreement import sum_of_words
from ..triton_kernels import backend
from ..triton_kernels.tables import capturing
from . import copies, step_op
from .arguments import settling
from .first_contact import NO_GRADIENT, FirstSteps, introduce, speaks
from .interrupts import SignalsWait
from .options import Made
from .scaling import SCALER_ATTRIBUTES, Agreed, LossScale, Scaling
from .settings import Options, Params
from .sharding import local
from .state import loading, saving
from .state.keeper import Keeper
from .under_ddp import UnderDdp, warn_of_averages

SHOWN_WHERE_ON = ("max_grad_norm", "master_weights", "stochastic_rounding", "capturable")
"""Options that ``repr`` only shows where they are on."""


COMPARED_EVERY = 64
"""Steps after which parameters and state that all ranks have in common enter the next digest, and what model-parallel
ranks have alike is compared."""

NOTHING_TRAINS = (
    "no parameter of this {} requires gradients, so that step() changes nothing: pass model.parameters(), not the "
    "tensors of a state_dict(), or add_param_group() what is to train"
)


class DistributedOptimizer(Keeper):
    """Skeleton of an optimizer over flat buffers; see the module's docstring and ``Lamb``."""

    # Makes GradScaler call step() on every rank, also where it found an inf: there it can be refused.
    _step_supports_amp_scaling = True

    compresses: ClassVar[bool] = True
    """Whether less is sent than DDP would send."""

    weighs: ClassVar[int] = 1
    """How many columns of coefficients weigh gradients, see ``scale_coefficients``."""

    _late_error: Exception | None = None
    exp_avg: Tensor

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let constructors say where an argument belongs that Python would only call unexpected."""
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls):
            cls.__init__ = settling(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, params: Params, defaults: dict[str, Any], **settings: Any) -> None:
        super().__init__(params, defaults, **settings)
        introduce(self, self._chosen(), settings.get("process_group"))

    def set_up(self, block_size: int | None = None) -> None:
        """Make all that follows from parameters, options and ranks; begin the checks of first steps anew."""
        self.first_steps, self.under_ddp = FirstSteps(), UnderDdp()
        super().set_up(block_size)
        self.number = step_op.number_of(self)

    def build(self) -> None:
        """Allocate all state, and what a step needs besides."""
        super().build()
        self._missing: tuple[int, ...] = ()  # tensors of which this rank has no gradient in this step
        self._absent: Tensor | None = None  # of which no rank has one: bool [tensors], or None: there are none
        self.nothing = torch.empty(0, device=self.device)
        self.under_ddp.averaged = False
        counted: Tensor | None = None
        if any(self.parameters.replicas) and self.ranks.model_parallel.groups[0].transport.rank > 0:
            elsewhere = torch.tensor(self.parameters.replicas, device=self.device)
            counted = (~elsewhere)[self.places.block_tensor.long()].double()
        self.scaling = Scaling(self.layout, self.device, counted)
        self._until_compared = 0  # steps until model-parallel ranks next compare what they have alike

    @property
    def _rounding(self) -> Tensor | None:
        """Return what ops draw the random bits of stochastic rounding from; on the device, equal on all ranks."""
        rounds = self.options.stochastic_rounding or self.options.master_weights == "8bit"
        return self.steps.updates if rounds else None

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
        if not self.parameters.owners:  # nothing trains yet: nobody meets, and no step is counted
            self.parameters.usable([], self.nothing)
            self._opt_called = True
            self.first_steps.say(self, [NOTHING_TRAINS.format(type(self).__name__)])
            return loss
        if torch.compiler.is_compiling():
            with torch.no_grad():
                # What can be seen of tensors while they are traced the compiler guards from then on.
                grads = self.parameters.gradients(self.nothing)
                torch.ops.fusedonebit.step(self.parameters.params, grads, self.number, self.parameters.fits(grads))
            return loss
        with SignalsWait(), torch.no_grad():  # a signal within no_grad() would leave gradients off for good
            self.take_step(self.parameters.gradients(self.nothing))
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero. Those that no step has used count as a step that was skipped.

        Where one rank makes gradients for another purpose, such as a saliency map, drop them by ``model.zero_grad()``.
        """
        with SignalsWait():
            self.steps.count.clear(self.parameters.owners)
            super().zero_grad(set_to_none)
            self.steps.count.cleared(self.parameters.owners)

    # Schedulers replace ``step`` by a wrapper that notes the call, unless it says that they have; compilers refuse it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def take_step(self, given: Sequence[Tensor], params: Sequence[Tensor] | None = None, checked: bool = False) -> None:
        """Take a step on ``given`` gradients, maybe ``checked``, that updates ``params`` in the parameters' stead."""
        with SignalsWait():
            try:
                self._step_or_raise(given, params, checked)
            except BaseException as error:
                if self.steps.end_early(error):
                    self.coefficients.forget()
                # A GradScaler removes what it has set only after a step that ends well.
                for name in SCALER_ATTRIBUTES:
                    vars(self).pop(name, None)
                raise

    def _step_or_raise(self, given: Sequence[Tensor], params: Sequence[Tensor] | None, checked: bool) -> None:
        self._opt_called = True  # for schedulers
        steps, ddp = self.steps, self.under_ddp
        steps.refuse_if_broken()
        steps.captured = captured = self._captured()
        if not captured:
            steps.outcomes.absorb_replays()
        self.begin_step(captured)
        traffic, noticed = self.ranks.transport.traffic, {"elsewhere": ddp.elsewhere}
        steps.note((self.first_steps, vars(self.first_steps)), (ddp, noticed), (traffic, vars(traffic)))
        steps.number = self._take_number(given, params is not None, captured)
        error: Exception | None = None
        try:
            self.take_hyper_parameters()
            grads = given if checked else self.parameters.usable(given, self.nothing)
        except Exception as caught:
            error = caught
        if not captured:
            error = self._compare_replicas(error)
        if error is not None:  # the others must not wait for this rank: it takes part, and says that it can't go on
            grads = [self.nothing] * len(self.parameters)
        saw_averages = not captured and ddp.notice(self.parameters.owners, grads, self.ranks.transport, self.compresses)
        looks = not (captured or self.first_steps.over or error is not None)
        said: list[str] = []
        if looks:
            said = self.first_steps.look(self, grads, steps.count.added_up, bool(ddp.elsewhere))
        # A rank that can't take the step says that it has all gradients: so no tensor is left out because of it.
        self._missing = () if error is not None else self.parameters.missing(grads)
        with self.parameters.standing_in(self.parameters.params if params is None else params):
            coef = self._ready()
            steps.go_on()
            flags = self._synchronise_and_update(grads, coef, error is not None, captured)
        self._advance(flags)
        error = self._error_due(error)
        # What replays count comes to the host when one asks.
        known = [] if captured else steps.outcomes.record(self._known(flags), failed=error is not None)
        if error is not None:
            steps.count.fail()
        steps.end()
        ddp.averaged = False
        if error is not None:
            raise error
        steps.outcomes.act(known, self._describe)
        if looks and len(self._missing) == len(self.parameters) and self._has_nobody():
            said.append(NO_GRADIENT)
        self.first_steps.say(self, said)
        if saw_averages and speaks(self):
            warn_of_averages()

    def _has_nobody(self) -> bool:
        """Tell whether no rank has a gradient, where this one has none; False where ranks don't tell; waits."""
        return self.ranks.transport.world_size == 1 if self._absent is None else bool(self._absent.all())

    def _compare_replicas(self, error: Exception | None) -> Exception | None:
        """Return ``error``, or, in every 64th step, that model-parallel ranks no longer have parameters alike."""
        if not self.ranks.model_parallel.groups:
            return error
        due, self._until_compared = self._until_compared == 0, (self._until_compared - 1) % COMPARED_EVERY
        if not due:
            return error
        hint = "no parameter was changed in this step; all must be loaded, and changed, alike"
        with self.steps.breaking():
            return self.ranks.disagreement(self.ranks.model_parallel.groups[0], self.values_of_replicas(), error, hint)

    def _take_number(self, given: Sequence[Tensor], compiled: bool, captured: bool) -> int | Tensor:
        """Count a step on ``given`` gradients, which maybe a compiler passes; return its number in messages."""
        if captured:
            return self.steps.count.capture()
        self._check_repeated(self.steps.count.take(self.parameters.owners, given, compiled))
        return self.steps.count.number

    def _check_repeated(self, repeated: bool) -> None:
        """Raise RuntimeError if a step that this rank repeats can't tell the others of it."""

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
        if not self._can_capture:
            raise RuntimeError(
                f"a step can only be captured in the compression stage, not in {self._phase!r}: take uncaptured steps "
                'until optimizer.phase == "compression"; several ranks of AdamW and Lamb have no such stage'
            )
        if self.just_loaded:
            raise RuntimeError(
                "the first step after load_state_dict() can't be captured in a CUDA graph, since ranks compare their "
                "parameters in it: take an uncaptured step first"
            )
        return True

    @property
    def _can_capture(self) -> bool:
        """Tell whether the coming step could be captured in a CUDA graph."""
        return self._phase == "compression"

    def begin_step(self, captured: bool = False) -> None:
        """Enter the stage of the coming step, once; DDP's hook may come before ``step``."""
        if self.steps.begun:
            return
        with SignalsWait(), self.steps.breaking():
            if not captured and self.just_loaded:
                self.agree_on_loaded()
                self.just_loaded = False
            self.ranks.transport.traffic.start_step()
            self.ranks.inside.traffic.start_step()
            if not captured:
                self._enter_phase()
            self.steps.begun, self.steps.changing = True, False

    def _enter_phase(self) -> None:
        """Change the stage if it is time, alike on all ranks; ``steps.changing`` says so before anything is changed."""

    def _ready(self) -> Tensor:
        """Return the coefficients of the step that is about to be taken."""
        self._absent = None
        self.coefficients.begin(self._renews_on_the_way and self._rounding is None)
        coef = self.coefficient_table()
        self.coefficients.lend()
        self.parameters.before_update()
        return coef

    def _synchronise_and_update(self, grads: Sequence[Tensor], coef: Tensor, abort: bool, captured: bool) -> Tensor:
        self.steps.outcomes.attempts += not captured
        with self.steps.breaking(begun=not captured):
            flags = self._exchange(grads, coef, abort)
            self.parameters.after_update()
            return flags

    def _agree(self, grads: Sequence[Tensor], coef: Tensor, transport: Transport, **how: Any) -> Agreed:
        """Agree on what gradients are multiplied with, and on holding still, and note it; ``how``: see ``Scaling``."""
        which = LossScale.of(self), self.options.max_grad_norm, transport, self.ranks.model, self.weighs
        return self.scaling.agree(grads, coef, *which, **how)

    def coefficient_table(self) -> Tensor:
        """Return the coefficients of the coming step, float32 [tensors, columns of ``Coef``]."""
        return self.coefficients(self.hyper.taken, Made(self.steps.of_each))

    def _united(self, flags: Tensor) -> Tensor:
        """Return the flags that any rank with a part of the model has, int32 [1]: all skip a step together."""
        return self.ranks.model_parallel.unite(flags, self.steps.number)

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Exchange with the other ranks and update; return the step's flags, int32 [1]."""
        raise NotImplementedError

    def _known(self, flags: Tensor) -> Tensor | int:
        """Return the step's flags, or their value where the host knows it."""
        return flags

    @property
    def _renews_on_the_way(self) -> bool:
        """Tell whether the coming step renews the table of coefficients, and counts, in other launches' stead."""
        return False

    def _advance(self, flags: Tensor) -> None:
        """Count the update, unless it was skipped; of tensors only those of which some rank had a gradient."""
        if self.coefficients.counted:
            self.coefficients.end()
        else:
            self.coefficients.advance(flags, *self._counters())
        self._compare_state()

    def _compare_state(self) -> None:
        """Let ranks compare what they have in common when they next meet, once in so many steps."""
        if self.steps.captured or self.ranks.transport.world_size == 1 or self.digest is None or not self.synchronised:
            return
        done = self.steps.count.total
        if done // COMPARED_EVERY > max(0, done - self._round_steps) // COMPARED_EVERY:
            for tensor in self._in_common():
                self.digest.add_(sum_of_words(tensor))

    def _in_common(self) -> list[Tensor]:
        """Return what all ranks have alike between two synchronisations, to the bit, dense: see ``StateSpec``."""
        kept = [spec for spec in self.kept if spec.in_common and spec.applies(self, self.compressed)]
        masters = [] if self.masters_of_rank else [self.parameters.dense[i] for i in self.parameters.masters]
        values = [local(p).detach() for p in self.parameters.owners] + masters
        dense = [value.as_strided((value.numel(),), (1,)) for value in values]
        return [self.steps.of_each, *dense, *(spec.tensor(self) for spec in kept)]

    @property
    def _round_steps(self) -> int:
        """Return how many steps lie between the last synchronisation and the one before."""
        return 1

    @property
    def digest(self) -> Tensor | None:
        """Return checksums of what all ranks have received alike, which they compare when they next meet: int64 [n].

        None where nobody does.
        """
        raise NotImplementedError

    def _counters(self) -> tuple[Tensor | None, ...]:
        """Return what the end of a step counts by, and on; called once in a step."""
        return self._absent, *self.steps.counters()

    @property
    def _tag_of_shards(self) -> int:
        """Return what ranks with other shards must have alike: hyper-parameters and the number of steps, 31 bits."""
        return (self.coefficients.tag ^ self.steps.count.total) & 0x7FFFFFFF

    def _say_where(self, what: str) -> str:
        if self.ranks.model_parallel.count > 1:
            what = f"model-parallel ranks differ in the number of steps, or some of them have found: {what}"
        here = "; ".join(", ".join(f"{k}={group[k]}" for k in self.hyper.names) for group in self.param_groups)
        return f"{what}. On rank {self.ranks.transport.rank}, in its step {self.steps.count.total}: {here}"

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
    def averages_gradients(self) -> bool:
        """Tell whether the coming step uses averages of the ranks' gradients; else DDP must leave them alone."""
        return not self.compressed

    @property
    def last_grad_norm(self) -> Tensor:
        """Return the norm of the last step's gradients before clipping, in memory of its own, without waiting.

        Float32 []; 0 without ``max_grad_norm``.
        """
        return self.scaling.norm.clone()

    def stats(self) -> dict[str, Any]:
        """Return where training stands. Waits for the device.

        Returns:
            phase; step (updates done); skipped_steps; partial_steps (those of this process, but for replays of CUDA
            graphs, in which elements alone were left out whose gradient was no number, or too large); backend;
            transport; world_size; parameters and padding (elements); collectives_step, bytes_step and bytes_total (sent
            by this rank to others, with what DDP sends if it averages, attached or not); averaged_already (whether DDP
            averages gradients that were to be compressed, without ``ddp.attach``); collectives_inside and bytes_inside
            (of the last step, between ranks that hold other shards or parts, or are of one node); state_bytes
            (allocated); freeze_step (None); grad_norm (before clipping, of the last step; None without
            ``max_grad_norm``).
        """
        self.catch_up()
        transport, layout = self.ranks.transport, self.layout
        return {
            "phase": self.phase,
            "step": self.steps.outcomes.updates,
            "skipped_steps": self.steps.outcomes.skipped,
            "partial_steps": self.steps.outcomes.partial,
            "freeze_step": None,
            "backend": backend(self.device),
            "transport": repr(transport),
            "world_size": transport.world_size,
            "parameters": layout.real_numel,
            "padding": layout.numel - layout.real_numel,
            "collectives_step": transport.traffic.collectives_step,
            "bytes_step": transport.traffic.bytes_step,
            "bytes_total": transport.traffic.bytes_total,
            "averaged_already": bool(self.under_ddp.elsewhere),
            "collectives_inside": self.ranks.inside.traffic.collectives_step,
            "bytes_inside": self.ranks.inside.traffic.bytes_step,
            # Of a ring all-reduce of float32 gradients.
            "bytes_fp32": 2 * 4 * layout.real_numel * (transport.world_size - 1) // transport.world_size,
            "state_bytes": self._state_bytes(),
            "grad_norm": None if self.options.max_grad_norm is None else float(self.scaling.norm),
        }

    def _state_bytes(self) -> int:
        """Return the bytes of all that the next step needs, tables included; each piece of memory counts once."""
        storages = {(memory := tensor.untyped_storage()).data_ptr(): memory.nbytes() for tensor in self._held()}
        return sum(storages.values())

    def _held(self) -> list[Tensor]:
        """Return what is declared, what else the next step needs of the last, and tables."""
        declared = [spec.tensor(self) for spec in self.kept if spec.wanted(self)]
        masters = [*(self.parameters.dense[i] for i in self.parameters.masters), *self.parameters.loaded()]
        masters += [] if self.parameters.correction is None else [self.parameters.correction]
        counts = [self.steps.updates, self.steps.of_each, *self.scaling.held()]
        return [*declared, *masters, *counts, self.places.block_tensor, *self.live]

    def _scratch(self) -> list[Tensor]:
        """Return what only serves within a step, besides a reducer's."""
        return []

    def _layer_stats(self) -> dict[str, list[Any]]:
        """Return what ``stats(layers=True)`` of a subclass tells of layers: one entry per tensor each."""
        return {"name": list(self.parameters.called)}

    def owed(self) -> float:
        """Return the norm of what compression has left out so far, over that of the last update; waits for the device.

        0 where nothing is left out; infinite where there was no update to compare with, as after a skipped step.
        """
        return 0.0

    def momentum(self, param: Tensor) -> Tensor:
        """Return the momentum of one parameter, equal on all ranks, float32 of its shape."""
        i = self._index(param)
        (spec,) = (spec for spec in self.kept if spec.name == "exp_avg")
        return self.part_of(spec, i).to(torch.float32, copy=True)

    def _index(self, param: Tensor) -> int:
        for i, p in enumerate(self.parameters.owners):
            if p is param:
                return i
        got = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
        raise ValueError(f"param must be a trainable parameter of this optimizer, got {got}")

    def __repr__(self) -> str:
        shown = [name for name in SHOWN_WHERE_ON if getattr(self.options, name)]
        lines = [
            f"phase: {self.phase}, {self.steps.outcomes.updates} updates",
            *self._chosen(),
            *(f"{name}: {getattr(self.options, name)!r}" for name in shown),
        ]
        groups = super().__repr__().split("\n", 1)[1]
        return "\n".join([f"{type(self).__name__} (", *lines, groups])

    def _chosen(self) -> list[str]:
        """Return lines that say what was chosen, by the user or for want of a choice."""
        return [
            *self.described(),
            f"block_size: {self.layout.block_size}",
            f"backend: {backend(self.device)}",
            f"transport: {self.ranks.transport!r}",
        ]

    def described(self) -> list[str]:
        """Return lines of a subclass for ``repr``: what it alone can be told."""
        own = [name for name in self.options.told if name not in Options.told]
        return [f"{name}: {getattr(self.options, name)}" for name in own]

    # ---------------------------------------------------------------- checkpoints

    def plain_state(self) -> dict[str, Any]:
        """Return the plain values of a checkpoint; they say if a step has begun, whose stage is not entered again."""
        return super().plain_state() | ({"begun": True} if self.steps.begun else {})

    def resume(self, header: Mapping[str, Any]) -> None:
        """Take up a checkpoint's plain values."""
        super().resume(header)
        self.steps.begun = self.wrote(header) and header.get("begun", False)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors and plain values only; see ``core.state.saving``, and ``dcp``.

        Raises:
            CollectiveError: after a step that ended so, or was interrupted while it changed parameters: half a step is
                no state to go on from.
        """
        self.steps.refuse_if_broken()
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
