"""Optimizers whose workers update by themselves, and agree on one global update in rounds.

A round is ``local_steps`` steps (Marsit, Algorithm 2, with several local updates): in all but the last
each worker moves its own parameters, and nothing is sent. In the last all workers' updates of the
round become one (``comm.rounds``), which is applied to the parameters that all had when the round
began; so after it they are bit-identical on all ranks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import Flag, LocalTransport, NodePart, Part, Transport
from ..comm.rounds import RoundAllReduce
from ..core.optimizer import DistributedOptimizer
from ..core.scaling import Agreed
from ..core.settings import Options
from ..core.state.header import COUNT, INT, INT32, POSITIVE, Field, Fields, list_of
from ..core.state.spec import Specs, StateSpec
from ..triton_kernels import TAIL, Coef, FlatLayout, add_values, apply_momentum, block_table, flatten


@dataclass(frozen=True, kw_only=True)
class RoundOptions(Options):
    """Settings of an optimizer that works in rounds; see ``marsit.Rounds`` for their meaning."""

    local_steps: int = 1
    takes: ClassVar = Options.takes - {"bias_correction", "eps_inside_sqrt"}

    def check(self) -> None:
        """Raises ValueError for the first setting that makes no sense."""
        super().check()
        steps = self.local_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"local_steps must be an int >= 1, got {steps!r}: 1 synchronises every step")
        if self.stochastic_rounding and self.local_steps > 1:
            raise ValueError(
                f"stochastic_rounding must be False with local_steps={self.local_steps}, got True: workers' own steps "
                "are rounded to nearest; use master_weights=True"
            )
        if self.capturable:
            raise ValueError("capturable must be False, got True: what a step does depends on its place in the round")


class RoundOptimizer(DistributedOptimizer):
    """Skeleton of an optimizer that works in rounds; see the module's docstring and ``MarsitSGD``."""

    settings: ClassVar[type[Options]] = RoundOptions
    options: RoundOptions
    columns: ClassVar = {Coef.GLOBAL_RATIO: "global_ratio"}
    takes_shards: ClassVar = False
    masters_of_rank: ClassVar = True
    kept: ClassVar[Specs] = (
        StateSpec("momentum_buffer", "element", "exp_avg", of_rank=True, published=True, when="_is_sgd_with_momentum"),
        StateSpec("exp_avg", "element", "exp_avg", of_rank=True, published=True, when="_is_adam"),
        StateSpec(
            "exp_avg_sq", "element", "exp_avg_sq", of_rank=True, published=True, when="_is_adam", not_negative=True
        ),
        StateSpec("compensation", "element", "reducer.compensated", of_rank=True, published=True),
        # Between two rounds the parameters say it.
        StateSpec(
            *("anchor", "element", "_round_start"),
            when="_has_local_steps",
            only="local",
            published=True,
            optional=True,
            holds_parameters=True,
            given=True,
        ),
    )
    phases: ClassVar = dict.fromkeys(("uncompressed", "one-bit", "local"), False)
    header_fields: ClassVar[Fields] = {
        "block_size": Field(POSITIVE),
        "line": Field(POSITIVE),
        "inside": Field(POSITIVE),
        "rounds": Field(COUNT),
        "counted": Field(COUNT, False),
        "digest": Field(INT32),
        "local": Field(COUNT),
        "flags": Field(INT),
        "tag": Field(INT),
        "missed": Field(list_of(COUNT), False, one_per="index"),
    }
    exp_avg_sq: Tensor

    def check_group(self, group: dict[str, Any], name: str = "") -> None:
        super().check_group(group, name)
        where = f" in {name}" if name else ""
        if self._built and not self.exp_avg.numel() and group.get("momentum"):
            raise ValueError(
                f"momentum must be 0 where no group had any at construction, got {group['momentum']!r}{where}; "
                "construct the optimizer anew"
            )
        if group.get("eps") == 0:
            raise ValueError(f"eps must be > 0, got 0{where}: each worker divides by its own variance")

    @property
    def _is_adam(self) -> bool:
        return "betas" in self.param_groups[0]

    @property
    def _is_sgd_with_momentum(self) -> bool:
        return not self._is_adam and any(group["momentum"] for group in self.param_groups)

    @property
    def _has_local_steps(self) -> bool:
        return self.options.local_steps > 1

    @property
    def _round_start(self) -> Tensor:
        return self._anchor[: self.layout.numel]

    def _make_buffers(self) -> None:
        super()._make_buffers()
        anchored = self.layout.numel + TAIL if self.options.local_steps > 1 else 0
        self._anchor = torch.zeros(anchored, device=self.device)
        between, part = self.transport, Part(self.layout)
        if self.levels is not None:
            between, inside = self.levels
            part = NodePart(self.layout, inside, self.options.hierarchy_dtype, self.device)
        self.reducer = self._make_reduce(between, part)

    def _make_reduce(self, transport: Transport, part: Part) -> RoundAllReduce:
        """What makes one global update of all workers' updates of a part of the line."""
        raise NotImplementedError

    def check_levels(self) -> None:
        if self.options.local_steps > 1:
            raise ValueError(
                f"hierarchy must be None with local_steps={self.options.local_steps}: ranks of a node move together"
            )

    def build(self) -> None:
        self._local = self._tag = 0
        self._held_error: Exception | None = None
        self._unsettled: list[tuple[int, bool]] = []  # rounds that may have been skipped: attempt, full precision
        super().build()
        layout, device = self.layout, self.device
        self._no_flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, device=device)
        self._as_it_is = torch.ones(max(1, len(layout.sizes)), len(Coef), device=device)
        # One tensor of the same blocks: the parameters as all ranks had them when the round began.
        self._line = FlatLayout((layout.numel,), layout.world_size, layout.block_size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, between two rounds. Every rank must call it; see ``DistributedOptimizer``."""
        if not self._built:
            super().add_param_group(param_group)
            return
        if self.levels is not None:
            raise RuntimeError(
                "add_param_group must be called without hierarchy: each rank has moments of its part of the line only, "
                "which would lie elsewhere; construct a new optimizer"
            )
        if self._local:
            raise RuntimeError(
                f"add_param_group must be called between two rounds, not after {self._local} of "
                f"{self.options.local_steps} local steps; take the others first"
            )
        self.reducer.settle()
        self.catch_up()
        before, counted = self.reducer, self._counted()
        super().add_param_group(param_group)
        self.reducer.resume(before.rounds, int(before.digest), before.pending, counted)

    @property
    def averages_gradients(self) -> bool:
        """False: workers update with their own."""
        return False

    # ---------------------------------------------------------------- the step

    @property
    def between_rounds(self) -> bool:
        return self._local == 0

    def _exchange(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        self.parameters.before_update()
        if self._local < self.options.local_steps - 1:
            self._move_alone(grads, coef)
            flags = self._no_flags.clone()
        else:
            flags = self._synchronise(grads, coef, abort or self._held_error is not None)
        self.parameters.after_update()
        return flags

    def _move_alone(self, grads: Sequence[Tensor], coef: Tensor) -> None:
        """A step between two rounds: x = x - u, and u into what will be agreed on."""
        if self._local == 0:
            self._remember()
        self._note_missing(first=self._local == 0)
        agreed = self._scaling(grads, self.reducer.largest_gradient, LocalTransport())
        coef = self._leaving_out(agreed.limited(coef), self._missing)
        self._add(self.reducer, grads, coef, self.reducer.everything, agreed, moves=True)
        self.reducer.formed()
        self._tag = self._mixed_tag()
        self._local += 1
        self._phase = "local"

    def _synchronise(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        reduce, several = self.reducer, self.options.local_steps > 1
        agreed = self._scaling(grads, reduce.largest_gradient)
        self._note_missing(first=self._local == 0)
        own = agreed.limited(coef)
        own = self._leaving_out(own, self._missing) if several else own
        moments = [flat for flat in (self.exp_avg, self.exp_avg_sq) if flat.numel()]
        more = {"hold": agreed.hold, "changed": moments, "goes": self._global_step(coef)}
        told = self.told(abort, self._step_number, self._missed, **more)._replace(tag=self._mixed_tag())
        reduce.synchronise(lambda part, chunks: self._add(part, grads, own, chunks, agreed), told)
        self._absent = reduce.absent
        self._apply()
        reduce.forget()
        if self._absent is not None:
            reduce.restore(self._absent)
            self.own_steps -= self._absent * self._local
        self._local = self._tag = 0
        self._phase = "uncompressed" if reduce.full_precision else "one-bit"
        self._unsettled.append((self.outcomes.attempts, reduce.full_precision))
        return reduce.flags

    def _enter_phase(self) -> None:
        """Takes back the rounds that were skipped, as soon as all ranks know of them."""
        while self._unsettled:
            attempt, full_precision = self._unsettled[0]
            skipped = self.outcomes.was_skipped(attempt)
            if skipped is None:
                return
            if skipped:
                self.reducer.take_back(full_precision)
            del self._unsettled[0]

    def _counted(self) -> int:
        """Rounds that were not skipped, as far as this rank knows."""
        skipped = [attempt for attempt, _ in self._unsettled if self.outcomes.seems_skipped(attempt)]
        return self.reducer.counted - len(skipped)

    def _mixed_tag(self) -> int:
        """A hash of the hyper-parameters of all steps of this round so far, the present one included."""
        return (1_000_003 * self._tag + self.coefficients.tag) & 0x7FFFFFFF

    def _global_step(self, coef: Tensor) -> Tensor:
        """eta_s: how far each coordinate goes in a round of signs, float32 [B]."""
        each = coef[:, Coef.LR] * coef[:, Coef.GLOBAL_RATIO] * self.options.local_steps
        return each[self._block_tensor]

    def _add(
        self,
        part: RoundAllReduce,
        grads: Sequence[Tensor],
        coef: Tensor,
        chunks: slice,
        agreed: Agreed,
        moves: bool = False,
    ) -> None:
        factor = self._one if agreed.factor is None else agreed.factor.reshape(1)
        hold = self._no_flags if agreed.hold is None else agreed.hold
        exp_avg, exp_avg_sq = (flat if flat.numel() else None for flat in (self.exp_avg, self.exp_avg_sq))
        decays = any(group["weight_decay"] for group in self._taken)
        part.add(self.parameters.dense, grads, chunks, coef, exp_avg, exp_avg_sq, factor, hold, decays, moves)

    def _remember(self) -> None:
        """Keeps the parameters that all ranks have."""
        flatten(self.parameters.dense, self.layout.sizes, self.layout.block_size, 1.0, None, self._anchor)

    def _apply(self) -> None:
        """x = x - g_t (Algorithm 2, line 6); of several local steps with the x that all ranks had before."""
        layout, reduce, live = self.layout, self.reducer, self.live
        anchored = self.options.local_steps > 1
        scale, values = self._going(reduce.scale), reduce.values
        anchor, rounding = self._anchor[: layout.numel], None if anchored else self._rounding
        target, sizes = ([anchor], (layout.numel,)) if anchored else (self.parameters.dense, layout.sizes)
        if values is not None:
            where = (live.bits, live.row, reduce.flags, rounding)
            values = self._going(values.view(layout.n_blocks, -1)).view(-1)
            add_values(target, sizes, layout.block_size, values, False, *where)
        else:
            apply_momentum(
                target,
                sizes,
                layout.block_size,
                reduce.bits,
                scale,
                None,
                False,
                self._as_it_is,
                block_table(self._line, self.device) if anchored else self._block_tensor,
                live.bits,
                live.row,
                reduce.flags,
                rounding,
            )
        if anchored:  # also where the round was skipped
            where = (live.bits, live.row, self._no_flags, None)
            add_values(self.parameters.dense, layout.sizes, layout.block_size, anchor, True, *where)

    def _going(self, by_block: Tensor) -> Tensor:
        """A global update [B, ...], 0 in tensors that no worker has a gradient of."""
        if self._absent is None:
            return by_block
        still = self._absent[self._block_tensor]
        return torch.where(still.view(-1, *[1] * (by_block.dim() - 1)), 0.0, by_block)

    def _error_due(self, error: Exception | None) -> Exception | None:
        """Between two rounds nobody hears of an error: this rank raises it, with all others, when they next meet."""
        held = self._held_error or error
        self._held_error = held if self._phase == "local" else None
        return None if self._phase == "local" else held

    def _describe(self, flag: Flag) -> str:
        return self._say_where(self.reducer.describe())

    # ---------------------------------------------------------------- checkpoints

    def settle(self) -> None:
        self.reducer.settle()

    def plain_state(self) -> dict[str, Any]:
        return {
            "rounds": self.reducer.rounds,
            "counted": self._counted(),
            "digest": int(self.reducer.digest),
            "local": self._local,
            "flags": self.reducer.pending,
            "tag": self._tag,
            "missed": self._missed,
        }

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        name = type(self).__name__
        if header.get("algorithm") != name:
            raise ValueError(f"the checkpoint must be of {name}, got one of {header.get('algorithm', 'torch.optim')}")
        inside = 1 if self.levels is None else self.inside.world_size
        here = (self.transport.world_size, self.layout.block_size, self.layout.numel)
        saved = (header["world_size"], header["block_size"], header["line"])
        if header["inside"] != inside or (inside > 1 and saved != here):
            raise ValueError(
                f"the checkpoint was written with {header['world_size']} ranks, {header['inside']} in a node, and "
                f"block_size={header['block_size']}, but here they are {here[0]}, {inside} in a node, and "
                f"block_size={here[1]}; construct the optimizer as it was"
            )
        if header["local"] and header["world_size"] != self.transport.world_size:
            raise ValueError(
                f"the checkpoint's world_size is {header['world_size']}, but here it is {self.transport.world_size}; "
                f"it was written after {header['local']} local steps of a round, whose parameters differ from rank to "
                "rank: save at the end of a round, or resume with as many ranks as wrote it"
            )
        if header["local"] >= self.options.local_steps:
            raise ValueError(
                f"the checkpoint was written after {header['local']} local steps of a round, but local_steps is "
                f"{self.options.local_steps}; save at the end of a round, or keep local_steps"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        self.reducer.resume(header["rounds"], header["digest"], header["flags"], header.get("counted"))
        self._local, self._tag, self._phase = header["local"], header["tag"], header["phase"]
        self._missed = tuple(header.get("missed", ()))

    # ---------------------------------------------------------------- what users look at

    def compensation(self, param: Tensor) -> Tensor:
        """This rank's compensation c of one parameter, float32 of its shape; zeros after a round of full precision."""
        i = self._index(param)
        self.reducer.settle()
        return self.parameters.shaped(self.reducer.compensated, i, self.layout.offset(i)).clone()

    def momentum(self, param: Tensor) -> Tensor:
        """This rank's own momentum of one parameter, float32 of its shape."""
        if self.exp_avg.numel():
            return super().momentum(param)
        self._index(param)
        return torch.zeros_like(param, dtype=torch.float32)

    def stats(self, compensation: bool = False) -> dict[str, Any]:
        """Where training stands. Waits for the device.

        Args:
            compensation: Also look at the compensation; reads and writes it once.

        Returns:
            What ``DistributedOptimizer.stats`` does, and: rounds (synchronisations), local_steps (done in this
            round) and wire_bytes (what only serves within a round); with ``compensation`` also
            compensation_norm (this rank's). If that grows and grows, ``global_ratio`` is too small.
        """
        told = super().stats() | {
            "rounds": self.reducer.rounds,
            "local_steps": self._local,
            "wire_bytes": self.reducer.wire_bytes,
        }
        if compensation:
            self.reducer.settle()
            told["compensation_norm"] = float(self.reducer.compensated.norm())
        return told
