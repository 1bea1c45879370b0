"""What all 1-bit optimizers share: the two stages, the skips, the checks and the counters.

An optimizer with a full-precision warm-up and an error-compensated 1-bit stage is a subclass with
two short methods: ``_update`` (one warm-up update from averaged gradients) and ``_apply`` (one
update from synchronised momentum bits). ``adam.OneBitAdam`` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import checkpoint, construction, inspection
from .comm import CollectiveError, CompressedAllReduce, Flag, Transport, agree, describe_mismatch, make_transport
from .errors import warn
from .freezing import AutoFreeze, DeadCoordinates, warn_text
from .hyperparameters import CoefficientTable, Options, check_group
from .outcomes import Outcomes
from .parameters import ParameterList, first_device, materialise
from .telemetry import upload
from .triton_kernels import TAIL, FlatLayout, choose_block_size, flatten, freeze, live_table

Phase = Literal["warmup", "compression"]


class OneBitOptimizer(torch.optim.Optimizer):
    """Skeleton of a 1-bit optimizer; see the module's docstring and ``OneBitAdam``."""

    # Makes GradScaler call step() on every rank, also where it found an inf: there it can be refused.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        defaults: dict[str, Any],
        options: Options,
        *,
        process_group: dist.ProcessGroup | Transport | None = None,
        mask: Mapping[Tensor, Tensor] | None = None,
        broadcast_parameters: bool = False,
    ) -> None:
        self.options = options
        self._built = False
        # From here to the agreement no rank may leave on its own: the others would wait for it.
        params, error = materialise(params)
        self.device = first_device(params)
        self._transport = make_transport(process_group, self.device)
        try:
            if error is not None:
                raise error
            options.check()
            check_group(defaults)
            super().__init__(params, defaults)
            self._list = ParameterList(self.param_groups)
            construction.check_masks(mask or {}, self._list)
            self._masks = dict(mask or {})
            construction.check_device(self.device)
        except Exception as caught:
            error = caught
        self._agree_on_construction(error, broadcast_parameters)
        self._build()
        self._built = True

    # ---------------------------------------------------------------- construction

    def _agree_on_construction(self, error: Exception | None, broadcast: bool) -> None:
        """Compares everything that must be equal on all ranks, values last."""
        facts = [] if error else construction.facts(self, broadcast)
        agree(self._transport, facts, self.device, error, "construct the optimizer alike on every rank")
        if broadcast:
            self._list.before_update()
            for dense in self._list.dense:
                self._transport.broadcast(dense.detach().as_strided((dense.numel(),), (1,)))
            with torch.no_grad():
                self._list.after_update()
        hint = "seed all ranks alike, load the same checkpoint, or pass broadcast_parameters=True to use rank 0's"
        agree(self._transport, self._list.values(), self.device, hint=hint)

    def _build(self) -> None:
        """Lays out the parameters and allocates all state; also anew after ``add_param_group``."""
        plist, device = self._list, self.device
        world_size = self._transport.world_size
        block_size = self.options.block_size or choose_block_size(plist.sizes, world_size)
        self.layout = FlatLayout(plist.sizes, world_size, block_size)
        self._exp_avg = torch.zeros(self.layout.numel, device=device)
        self._exp_avg_sq = torch.zeros(self.layout.numel, device=device)
        self._step = torch.zeros((), device=device)
        self._reduce = CompressedAllReduce(
            self.layout,
            self._transport,
            device=device,
            scale_norm=self.options.scale_norm,
            scale_scope=self.options.scale_scope,
            compensated=self._exp_avg,
        )
        self._set_live(excluded=())
        self._coefficients = CoefficientTable(plist.group_of, device, self.options.bias_correction)
        self._nothing = torch.empty(0, device=device)
        self._grad: Tensor | None = None
        self._phase: Phase = "warmup"
        self._variance_step: Tensor | None = None
        self._outcomes = Outcomes(device, self.options.nonfinite, self._describe_mismatch)
        self._freeze_at: int | None = None
        self.dead_tensors: list[int] = []
        self.dead_coordinates = 0
        self._broken = ""
        self._auto: AutoFreeze | None = None
        self._exp_avg_sq_sums: Tensor | None = None
        if self.options.freeze_step == "auto":
            beta2 = max(float(group["betas"][1]) for group in self.param_groups)
            self._auto = AutoFreeze(beta2, self.options.lr_warmup_steps, device)
            self._exp_avg_sq_sums = torch.zeros(self.layout.n_blocks, dtype=torch.float64, device=device)
        self._publish_state()

    def _set_live(self, excluded: Sequence[int]) -> None:
        masks = {}
        for i, p in enumerate(self._list.params):
            if p in self._masks:
                ordered = torch.empty_strided(p.shape, self._list.dense[i].stride(), dtype=torch.bool)
                masks[i] = ordered.copy_(self._masks[p]).as_strided((p.numel(),), (1,))
        self._reduce.set_live(live_table(self.layout, masks, excluded).to(self.device))

    def _publish_state(self) -> None:
        """Fills ``self.state`` with views of the flat buffers, under torch's names."""
        self.state.clear()
        for i, p in enumerate(self._list.params):
            offset = self.layout.offset(i)
            self.state[p] = {
                "step": self._step,
                "exp_avg_sq": self._list.shaped(self._exp_avg_sq, i, offset),
            }
            if self._phase == "warmup":
                self.state[p]["exp_avg"] = self._list.shaped(self._exp_avg, i, offset)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the variance is frozen. Every rank must call it.

        Raises:
            RuntimeError: in the compression stage.
            ValueError: for bad hyper-parameters, or if ranks add different groups.
        """
        if not self._built:
            super().add_param_group(param_group)
            check_group(self.param_groups[-1], f"group {len(self.param_groups) - 1}")
            return
        if self._phase != "warmup":
            raise RuntimeError(
                "add_param_group must be called before the freeze: the layout is fixed in the compression stage; "
                "construct a new optimizer"
            )
        self._outcomes.catch_up()
        kept = {p: {k: v.clone() for k, v in s.items()} for p, s in self.state.items()}
        outcomes, old_list, old_groups = self._outcomes, self._list, list(self.param_groups)
        error: Exception | None = None
        try:
            super().add_param_group({**param_group, "added_at": self._outcomes.updates})
            check_group(self.param_groups[-1], f"group {len(self.param_groups) - 1}")
            self._list = ParameterList(self.param_groups)
        except (TypeError, ValueError) as caught:
            error = caught
        try:
            self._agree_on_construction(error, broadcast=False)
        except Exception:
            self.param_groups, self._list = old_groups, old_list
            raise
        self._build()
        self._outcomes = outcomes
        for p, state in kept.items():
            for key, value in state.items():
                self.state[p][key].copy_(value)

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages over the ranks and updates the parameters. Every rank must call it equally often.

        Args:
            closure: Evaluates the model again and returns the loss.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``, on every rank.
            AbortedStepError, OutOfStepError: on every rank. After any of these parameters and step
                counts are as before, and in the compression stage gradients are kept as residual.
            CollectiveError: if a rank died or hangs; restart from a checkpoint.
            RuntimeError, TypeError, ValueError: if this rank's parameters or gradients can't be used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                "GradScaler is not supported yet: each rank would skip steps of its own. Train in bfloat16 "
                "without a scaler; steps with non-finite gradients are skipped on all ranks alike"
            )
        if self._broken:
            raise CollectiveError(f"this optimizer can't go on: {self._broken}")
        self._enter_phase()
        error: Exception | None = None
        try:
            grads = self._list.gradients(self._nothing)
        except (RuntimeError, TypeError, ValueError) as caught:
            # The others must not wait for this rank: it takes part, and says that it can't go on.
            grads, error = [self._nothing] * len(self._list), caught
        flags = self._synchronise_and_update(grads, abort=error is not None)
        self._step += (flags[0] == 0).float()
        if self._auto is not None and self._exp_avg_sq_sums is not None and self._phase == "warmup":
            self._auto.observe(self._exp_avg_sq_sums, self._step)
        if error is not None:
            self._outcomes.record_own_failure(flags)
            raise error
        self._outcomes.record(flags)
        return loss

    def _synchronise_and_update(self, grads: Sequence[Tensor], abort: bool) -> Tensor:
        self._transport.traffic.start_step()
        coef = self._coefficients(self.param_groups, self._step, self._variance_step)
        stage = self._step_warmup if self._phase == "warmup" else self._step_compression
        self._outcomes.attempts += 1
        try:
            return stage(grads, coef, abort)
        except CollectiveError as failure:
            # Half an exchange has left its traces in the residuals: no further step may build on it.
            self._broken = f"after {self._outcomes.updates - 1} updates, {failure}"
            raise CollectiveError(self._broken) from failure

    def _step_warmup(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        layout, world_size = self.layout, self._transport.world_size
        if self._grad is None:
            self._grad = torch.zeros(layout.numel + TAIL, device=self.device)
        # Behind the gradients: whether any is not finite, whether this rank aborts, and two numbers
        # all must agree on, told by sum and sum of squares; small enough to be exact in float32.
        modulus = int((2**24 / world_size) ** 0.5)
        marks = [self._outcomes.attempts % modulus, self._coefficients.tag % modulus]
        words = [0.0, float(abort), *marks, *(mark * mark for mark in marks)]
        tail = self._grad[layout.numel :]
        tail[:6] = upload(words, torch.float32, self.device)
        flatten(grads, layout.sizes, layout.block_size, 1.0 / world_size, self._grad)
        own = tail[2:6] * world_size
        self._transport.all_reduce(self._grad)
        self._marks_differ = tail[2:6] != own
        flags = (
            (tail[0] > 0).int() * int(Flag.NONFINITE)
            + (tail[1] > 0).int() * int(Flag.ABORT)
            + self._marks_differ.any().int() * int(Flag.MISMATCH)
        ).reshape(1)
        self._list.before_update()
        self._update(self._grad, coef, flags)
        self._list.after_update()
        return flags

    def _step_compression(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        self._reduce(grads, coef=coef, tag=self._coefficients.tag, abort=abort)
        self._list.before_update()
        self._apply(coef, self._reduce.flags)
        self._list.after_update()
        return self._reduce.flags

    def _describe_mismatch(self) -> str:
        if self._phase == "compression":
            what = describe_mismatch(self._reduce.arrived_words)
        else:
            steps, _ = self._marks_differ.view(2, 2).any(0).tolist()
            what = "number of steps" if steps else "hyper-parameters (learning rate and the like)"
        keys = ("lr", "betas", "eps", "weight_decay")
        here = "; ".join(", ".join(f"{k}={group[k]}" for k in keys) for group in self.param_groups)
        return f"{what}. On rank {self._transport.rank}: {here}"

    def _update(self, grad: Tensor, coef: Tensor, skip: Tensor) -> None:
        """One warm-up update from averaged gradients ``grad`` float32 [>= P]; none where skipped."""
        raise NotImplementedError

    def _apply(self, coef: Tensor, skip: Tensor) -> None:
        """One update from the synchronised momentum in ``self._reduce``; none where skipped."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} can't be pickled or deep-copied; use state_dict() and a new optimizer")

    def _own_state(self) -> dict[str, Any]:
        """What a subclass adds to a checkpoint: plain values and tensors."""
        return {}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Takes what ``_own_state`` returned; an empty mapping for a checkpoint of AdamW."""

    # ---------------------------------------------------------------- stages

    def _enter_phase(self) -> None:
        """Freezes the variance if it is time; the same on all ranks."""
        if self._phase == "compression":
            return
        if self._auto is not None:
            if self._auto.due():
                self._freeze()
        elif self._outcomes.updates >= int(self.options.freeze_step):
            # Skips may still be under way from the device: wait for them once, then it is exact.
            self._outcomes.catch_up()
            if self._outcomes.updates >= int(self.options.freeze_step):
                self._freeze()

    @torch.no_grad()
    def _freeze(self) -> None:
        """Ends the warm-up. Works in place: nothing of full size is allocated from here on."""
        if self._outcomes.updates == 0:
            raise RuntimeError(
                "freeze_step=0 needs a variance to freeze: call load_state_dict() with the state of an AdamW "
                "or 1-bit Adam run before the first step, or set freeze_step >= 1"
            )
        self._grad = None
        layout, reduce = self.layout, self._reduce
        dead = DeadCoordinates(layout, reduce.block_tensor, self._exp_avg_sq, reduce.live.numel)
        keep = self.options.dead_coordinates == "keep"
        coef = self._coefficients(self.param_groups, self._step, None)
        freeze(
            layout.sizes,
            layout.block_size,
            self._exp_avg,
            self._exp_avg_sq,
            coef,
            reduce.block_tensor,
            None if keep else dead.mean,
        )
        self._variance_step = self._step.clone()
        self._phase = "compression"
        self._freeze_at = self._outcomes.updates
        self.dead_coordinates = dead.count
        if not keep and dead.tensors:
            self.dead_tensors = dead.tensors
            self._set_live(excluded=dead.tensors)
            warn(warn_text(dead, self._list.names))
        self._publish_state()

    # ---------------------------------------------------------------- what users look at

    @property
    def phase(self) -> Phase:
        """``"warmup"`` or ``"compression"``: the stage of the last step taken."""
        return self._phase

    def stats(self) -> dict[str, Any]:
        """Where training stands. Waits for the device.

        Returns:
            phase; step (updates done); skipped_steps; freeze_step (None before the freeze); backend;
            transport; world_size; parameters and padding (elements); collectives_step, bytes_step and
            bytes_total (sent by this rank to others); state_bytes and wire_bytes (allocated);
            worker_error_norm (this rank's residual), server_error_norm (of the chunk it serves) and
            compensated_norm (of what was compressed), 0 in the warm-up; dead_tensors (names);
            dead_coordinates (with v == 0 at the freeze, in other tensors).
        """
        return inspection.stats(self)

    def worker_error(self, param: Tensor) -> Tensor:
        """This rank's residual e of one parameter, float32 of its shape; zero in the warm-up."""
        i = self._index(param)
        if self._phase == "warmup":
            return torch.zeros_like(param, dtype=torch.float32)
        self._reduce.settle()
        return self._list.shaped(self._exp_avg, i, self.layout.offset(i)).clone()

    def momentum(self, param: Tensor) -> Tensor:
        """The momentum of one parameter, equal on all ranks, float32 of its shape."""
        i = self._index(param)
        offset = self.layout.offset(i)
        flat = self._exp_avg if self._phase == "warmup" else self._reduce.result()
        return self._list.shaped(flat, i, offset).clone()

    def _index(self, param: Tensor) -> int:
        for i, p in enumerate(self._list.params):
            if p is param:
                return i
        raise ValueError(f"param must be a trainable parameter of this optimizer, got shape {tuple(param.shape)}")

    def __repr__(self) -> str:
        return inspection.describe(self, super().__repr__())

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors and plain values only. See ``checkpoint``."""
        return checkpoint.save(self, super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from ``state_dict`` of this optimizer or of ``torch.optim.AdamW``; all ranks call it.

        Raises:
            ValueError: on every rank, if the checkpoint is of another model, world size or rank;
                nothing was changed.
        """
        checkpoint.load(self, state_dict, super().load_state_dict)
