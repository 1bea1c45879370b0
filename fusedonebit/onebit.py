"""What all 1-bit optimizers share: the two stages and the freeze between them.

An optimizer with a full-precision warm-up and an error-compensated 1-bit stage is a subclass with
two short methods: ``_update`` (one warm-up update from averaged gradients) and ``_apply`` (one
update from synchronised momentum bits). ``adam.OneBitAdam`` is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .averaging import AveragingOptimizer
from .comm import CompressedAllReduce, Word, describe_mismatch
from .errors import warn
from .freezing import AutoFreeze, DeadCoordinates, denominator, least_variance, warn_text
from .hyperparameters import OneBitOptions
from .triton_kernels import freeze


class OneBitOptimizer(AveragingOptimizer):
    """Skeleton of a 1-bit optimizer; see the module's docstring and ``OneBitAdam``."""

    options: OneBitOptions

    def _build(self) -> None:
        super()._build()
        self._phase = "warmup"
        self._reduce = CompressedAllReduce(
            self.layout,
            self._transport,
            device=self.device,
            scale_norm=self.options.scale_norm,
            scale_scope=self.options.scale_scope,
            compensated=self._exp_avg,
            live=self._live,
            ternary=self.options.ternary,
        )
        self._variance_step: Tensor | None = None
        self._unit: Tensor | None = None
        self._freeze_at: int | None = None
        self.dead_tensors: list[int] = []
        self.dead_coordinates = 0
        self._auto: AutoFreeze | None = None
        if self.options.freeze_step == "auto":
            beta2 = max(float(group["betas"][1]) for group in self.param_groups)
            self._auto = AutoFreeze(beta2, self.options.lr_warmup_steps, self.device)
            self._exp_avg_sq_sums = torch.zeros(self.layout.n_blocks, dtype=torch.float64, device=self.device)

    def _exclude(self, tensors: Sequence[int]) -> None:
        """Leaves tensors out of everything from now on."""
        self.dead_tensors = list(tensors)
        self._live = self._live_table(excluded=tensors)
        self._reduce.set_live(self._live)

    def _publish_state(self) -> None:
        super()._publish_state()
        if self._phase == "compression":
            for state in self.state.values():
                del state["exp_avg"]

    # ---------------------------------------------------------------- the step

    def _coefficient_table(self) -> Tensor:
        return self._coefficients(self._taken, self._step, self._variance_step, self._unit)

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        if self._phase == "warmup":
            return super()._exchange(grads, coef, abort)
        self._reduce(
            grads,
            coef=coef,
            exp_avg_sq=self._exp_avg_sq if self.options.precondition else None,
            eps_inside_sqrt=self.options.eps_inside_sqrt,
            tag=self._coefficients.tag,
            abort=abort,
        )
        self._list.before_update()
        self._apply(coef, self._reduce.flags)
        self._list.after_update()
        return self._reduce.flags

    def _advance(self, flags: Tensor) -> None:
        super()._advance(flags)
        if self._phase == "warmup" and self._auto is not None and self._exp_avg_sq_sums is not None:
            self._auto.observe(self._exp_avg_sq_sums, self._step)

    def _describe_mismatch(self) -> str:
        if self._phase == "warmup":
            return super()._describe_mismatch()
        return self._say_where(describe_mismatch(self._reduce.arrived_words))

    def _apply(self, coef: Tensor, skip: Tensor) -> None:
        """One update from the synchronised momentum in ``self._reduce``; none where ``skip`` is set."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the freeze

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
                "freeze_step=0 needs a variance to freeze: call load_state_dict() with the state of an earlier run "
                "before the first step, or set freeze_step >= 1"
            )
        layout, block_tensor = self.layout, self._reduce.block_tensor
        dead = DeadCoordinates(layout, block_tensor, self._exp_avg_sq, self._live.numel)
        keep = self.options.dead_coordinates == "keep"
        self._before_compression()
        self._grad = None
        self._variance_step = self._step.clone()
        eps_inside_sqrt, precondition = self.options.eps_inside_sqrt, self.options.precondition
        coef = self._coefficient_table()
        least = least_variance(layout, self._exp_avg_sq, self._live, coef, eps_inside_sqrt) if precondition else None
        freeze(
            layout.sizes,
            layout.block_size,
            self._exp_avg,
            self._exp_avg_sq,
            eps_inside_sqrt,
            precondition,
            coef,
            block_tensor,
            None if keep else dead.mean,
            least,
        )
        self._phase = "compression"
        self._freeze_at = self._outcomes.updates
        self.dead_coordinates = dead.count
        if dead.tensors:
            warn(warn_text(dead, self._list.names, keep))
        if not keep and dead.tensors:
            self._exclude(dead.tensors)
        self._publish_state()

    def _before_compression(self) -> None:
        """Takes from the warm-up what a subclass needs later: momentum and gradient buffer are still there."""

    # ---------------------------------------------------------------- checkpoints

    def _buffers(self) -> dict[str, Tensor]:
        """What the compression stage keeps per element besides the residuals: float32 [P] each."""
        return {"exp_avg_sq": self._exp_avg_sq}

    def _momenta(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The momenta it keeps as bits uint8 [W, P / 8W] ([W, 2, P / 8W] where ternary) and scales float32 [B]."""
        return {"exp_avg": (self._reduce.gathered.bits, self._reduce.scale)}

    def _settled(self) -> dict[str, Any]:
        """Options that say in which unit, or with what, the compression stage goes on."""
        return {"precondition": self.options.precondition, "ternary": self.options.ternary}

    def _header(self) -> dict[str, Any]:
        return {
            "settled": self._settled(),
            "synchronisations": self._reduce.synchronisations,
            "digest": int(self._reduce.served.words[0, Word.DIGEST]),
            "variance_step": None if self._variance_step is None else int(self._variance_step),
            "freeze_step": self._freeze_at,
            "dead_tensors": list(self.dead_tensors),
            "dead_coordinates": self.dead_coordinates,
            "auto": None if self._auto is None else self._auto.state_dict(),
        }

    def _check_header(self, header: Mapping[str, Any]) -> None:
        if header["phase"] == "compression" and header["algorithm"] == type(self).__name__:
            for name, now in self._settled().items():
                was = header["settled"].get(name, False)  # what is missing did not exist when it was written
                if was != now:
                    raise ValueError(
                        f"the checkpoint was written with {name}={was!r}, but here it is {now!r}; it can only be "
                        "changed before the freeze"
                    )
        if self._auto is not None and header.get("auto") is not None:
            self._auto.check(header["auto"])

    def _resume(self, header: Mapping[str, Any]) -> None:
        if self._auto is not None and header.get("auto") is not None:
            self._auto.load_state_dict(header["auto"])
        if header["phase"] != "compression":
            return
        self._phase = "compression"
        self._freeze_at = header["freeze_step"]
        self._variance_step = torch.tensor(float(header["variance_step"]), device=self.device)
        self.dead_coordinates = header["dead_coordinates"]
        self._exclude(header["dead_tensors"])
        self._reduce.resume(header["synchronisations"], header["digest"])

    # ---------------------------------------------------------------- what users look at

    def stats(self) -> dict[str, Any]:
        """Where training stands. Waits for the device.

        Returns:
            phase; step (updates done); skipped_steps; freeze_step (None before the freeze); backend;
            transport; world_size; parameters and padding (elements); collectives_step, bytes_step and
            bytes_total (sent by this rank to others); state_bytes (what the next step needs) and
            wire_bytes (what only serves within a step: messages and partial sums), both allocated;
            worker_error_norm (this rank's residual), server_error_norm (of the chunk it serves) and
            compensated_norm (of what was compressed), all three 0 in the warm-up and in the unit in
            which things are compressed; dead_tensors (names); dead_coordinates (with v == 0 at the
            freeze, in other tensors).
        """
        reduce = self._reduce
        compensated, worker_error = reduce.worker.norms()
        _, server_error = reduce.server.norms()
        return super().stats() | {
            "freeze_step": self._freeze_at,
            "wire_bytes": reduce.wire_bytes + sum(t.nbytes for t in self._scratch()),
            "compensated_norm": compensated,
            "worker_error_norm": worker_error,
            "server_error_norm": server_error,
            "dead_tensors": [self._list.names[i] for i in self.dead_tensors],
            "dead_coordinates": self.dead_coordinates,
        }

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._reduce.state()]

    def worker_error(self, param: Tensor) -> Tensor:
        """This rank's residual e of one parameter, in units of the momentum, float32 of its shape."""
        i = self._index(param)
        if self._phase == "warmup":
            return torch.zeros_like(param, dtype=torch.float32)
        self._reduce.settle()
        return self._in_momentum_units(self._exp_avg, i)

    def momentum(self, param: Tensor) -> Tensor:
        """The momentum of one parameter, equal on all ranks, float32 of its shape."""
        if self._phase == "warmup":
            return super().momentum(param)
        return self._in_momentum_units(self._reduce.result(), self._index(param))

    def _in_momentum_units(self, flat: Tensor, i: int) -> Tensor:
        part = self._list.shaped(flat, i, self.layout.offset(i))
        if self.options.precondition:
            v, k = self._list.shaped(self._exp_avg_sq, i, self.layout.offset(i)), self._coefficient_table()[i]
            return part * denominator(v, k, self.options.eps_inside_sqrt)
        return part.clone() if self._unit is None else part / self._unit[i]

    def _described(self) -> list[str]:
        options = self.options
        scale = f"scale: {options.scale_norm}, {options.scale_scope}"
        scale += ", preconditioned" * options.precondition + ", ternary" * options.ternary
        return [f"freeze_step: {options.freeze_step!r}", scale]
