"""Marsit's algorithm (Wu et al., DAC 2022), also that of what it is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import MarsitAllReduce, NodeSection, Section, Transport
from ..comm.rounds import RoundAllReduce
from ..core.algorithm import Algorithm
from ..core.exchange import Exchange
from ..core.frame import Frame
from ..core.header import COUNT, INT, INT32, POSITIVE, Field, Fields
from ..core.scaling import Agreed
from ..core.stage import Stage
from ..core.state_tensor import StateTensor
from ..core.traits import Traits
from ..triton_kernels import TAIL, Coef, FlatLayout, add_values, apply_momentum
from ..triton_kernels.headers import folded
from ..triton_kernels.local_update import LocalUpdate
from ..triton_kernels.nouns import Places, Signs
from ..triton_kernels.tables import tables_of
from .local_steps import ANCHOR, RoundCount, leaving_out, may_rest
from .marsit_options import LocalOptions, MarsitAdamOptions, MarsitOptions


class Marsit(Algorithm, Stage):
    """Marsit, Algorithm 2, with the local updates of SGD or of Adam.

    Attributes:
        exp_avg, exp_avg_sq: The worker's own moments, float32 [P]; empty where its updates have none.
        round: The steps of this round.
    """

    traits: ClassVar = Traits(
        MarsitOptions,
        {"uncompressed": False, "one-bit": False, "local": False},
        columns={Coef.GLOBAL_RATIO: "global_ratio"},
        continues=False,
        shards=False,
        masters_of_rank=True,
    )
    options: LocalOptions
    weighs = 0
    header_fields: ClassVar[Fields] = {
        "block_size": Field(POSITIVE),
        "line": Field(POSITIVE),
        "inside": Field(POSITIVE),
        "rounds": Field(COUNT),
        "counted": Field(COUNT, False),
        "digest": Field(INT32),
        "flags": Field(INT),
    }
    exchange: Exchange

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        layout, device, options = frame.layout, frame.device, self.options
        self._adam = "betas" in frame.groups[0]
        self._had_moments = self._adam or self._has_momentum
        self.exp_avg = torch.zeros(layout.numel if self._had_moments else 0, device=device)
        self.exp_avg_sq = torch.zeros(layout.numel if self._adam else 0, device=device)
        # The parameters that all ranks have, while each moves by itself.
        self._anchor = torch.zeros(layout.numel + TAIL if options.round_steps > 1 else 0, device=device)
        between, part = frame.ranks.transport, Section(layout)
        if frame.ranks.levels is not None:
            between, inside = frame.ranks.levels
            part = NodeSection(layout, inside, options.wire.hierarchy_dtype, device)
        self.reducer = self.make_reducer(between, part)
        self.exchange, self.round = Exchange(frame, self.reducer), RoundCount(frame)
        self.parts = (self.exchange, self.round)
        self._one = torch.ones(1, device=device)
        self._as_it_is = torch.ones(max(1, len(layout.sizes)), len(Coef), device=device)
        # One tensor of the same blocks: the parameters as all ranks had them when the round began.
        self._flat = FlatLayout((layout.numel,), layout.world_size, layout.block_size)
        self._flat_tables = tables_of(self._flat, device)  # kept, because launches share what somebody keeps
        self._flat_places = Places.of(self._flat, self._flat_tables.tensor, frame.live)

    @property
    def _has_momentum(self) -> bool:
        """Tell whether SGD has any momentum, as groups say now."""
        return not self._adam and any(group["momentum"] for group in self.frame.groups)

    def make_reducer(self, transport: Transport, part: Section) -> RoundAllReduce:
        """Make what averages all workers' updates of a part."""
        frame, options = self.frame, self.options
        assert isinstance(options, MarsitOptions)
        where: dict[str, Any] = {"device": frame.device, "live": frame.live, "part": part, "topology": options.topology}
        names = ("rows", "full_precision_every", "compensation_limit", "seed")
        how = {name: getattr(options.rounds, name) for name in names}
        return MarsitAllReduce(part.layout, transport, **where, **how)

    # ---------------------------------------------------------------- groups

    def check_groups(self, groups: Sequence[Mapping[str, Any]], where: str = "") -> None:
        for number, group in enumerate(groups):
            if not self._had_moments and group.get("momentum"):
                raise ValueError(
                    f"momentum must be 0 where no group had any at construction, got {group['momentum']!r} in group "
                    f"{number}{where}; construct the optimizer anew"
                )

    def check_growth(self) -> None:
        if self.frame.ranks.levels is not None:
            raise RuntimeError(
                "add_param_group must be called without Wire(hierarchy=...): each rank has moments of its part of the "
                "flat index space only, which would lie elsewhere; construct a new optimizer"
            )
        if self.round.local:
            raise RuntimeError(
                f"add_param_group must be called between two rounds, not after {self.round.local} of "
                f"{self.options.round_steps} local steps; take the others first"
            )

    def carried(self) -> tuple[int, int, int, int]:
        self.exchange.settle()
        reducer = self.reducer
        return reducer.schedule.rounds, int(folded(reducer.digest)), reducer.pending, self._counted()

    def has_grown(self, carried: Any) -> None:
        self.reducer.resume(*carried)

    # ---------------------------------------------------------------- the step

    def enter_stage(self) -> bool:
        self.round.settle_ended(self._settle_round)
        return False

    def _settle_round(self, this: bool, skipped: bool) -> None:
        if skipped:
            self.reducer.schedule.take_back(full_precision=this)

    @property
    def synchronised(self) -> bool:
        """Tell whether all ranks have the same parameters now: between two rounds, not within one."""
        return self.round.local == 0

    @property
    def round_steps(self) -> int:
        """Return the length of a round."""
        return self.options.round_steps

    def step(self, grads: Sequence[Tensor], coef: Tensor, abort: bool) -> Tensor:
        """Take a step: Algorithm 2, which calls Algorithm 1; lines as ``fusedonebit.reference``'s."""
        frame, reducer, this, several = self.frame, self.reducer, self.round, self.options.round_steps > 1
        this.begin_step()
        if this.local < self.options.round_steps - 1:  # x = x - u, and u into what will be agreed on
            agreed = self.agree(grads, coef, alone=True)
            self._add(reducer, grads, leaving_out(frame, agreed.coef), reducer.everything, agreed, moves=True)
            self.phase = "local"
            this.end_step()
            return self.reducer.verdict.none  # nobody skips it
        steps_alone = this.local
        agreed = self.agree(grads, coef)
        own = leaving_out(frame, agreed.coef) if several else agreed.coef
        context = this.of_round(self.exchange.context(abort or this.failed, agreed.hold))
        moments = [flat for flat in (self.exp_avg, self.exp_avg_sq) if flat.numel()]
        context = context._replace(changed=moments, coef=coef, steps=self.options.round_steps)

        def add(part: RoundAllReduce, chunks: slice) -> None:
            # Algorithm 1, line 1: eta_l * g, or what SGD or Adam make of g, and the compensation.
            self._add(part, grads, own, chunks, agreed)

        # Algorithm 2, line 5. Algorithm 1, lines 2 to 9: on their way from worker to worker the signs of all become
        # one sign per coordinate; line 11: in rounds of full precision the mean of all is taken. That is g_t.
        self.exchange.synchronise(add, context, coef)
        if reducer.schedule.full_precision and may_rest(frame):
            reducer.keep_back(coef[:, Coef.LR] == 0.0)
        # Algorithm 2, line 6: x = x - g_t; of several local steps from the x that all had before.
        self._apply()
        # Nothing to do here for Algorithm 1, line 10: c = v - g_t is formed when v is next read; line 12: after full
        # precision c = 0.
        self.phase = "uncompressed" if reducer.schedule.full_precision else "one-bit"
        this.end(reducer.schedule.full_precision)
        flags = self.exchange.restore_absent()
        if frame.absent is not None:  # the round's other steps, too, were none of these tensors
            frame.steps.of_each -= frame.absent * steps_alone
        return flags

    def known(self, flags: Tensor) -> Tensor | int:
        """Return 0 of a step alone, which nobody skips: nothing is copied to the host."""
        return 0 if flags is self.reducer.verdict.none else flags

    def error_due(self, error: Exception | None) -> Exception | None:
        """Return this rank's error when all next meet: between two synchronisations nobody hears of it."""
        return self.round.error_due(error, self.phase == "local")

    def _add(
        self,
        part: RoundAllReduce,
        grads: Sequence[Tensor],
        coef: Tensor,
        chunks: slice,
        agreed: Agreed,
        moves: bool = False,
    ) -> None:
        frame = self.frame
        factor = self._one if agreed.factor is None else agreed.factor
        hold = self.reducer.verdict.none if agreed.hold is None else agreed.hold
        exp_avg, exp_avg_sq = (flat if flat.numel() else None for flat in (self.exp_avg, self.exp_avg_sq))
        decays = any(group["weight_decay"] for group in frame.hyper.taken)
        step = LocalUpdate(factor, decays, moves, self._round_start if moves and self.round.local == 0 else None)
        part.add(frame.parameters.dense, grads, chunks, coef, exp_avg, exp_avg_sq, step, hold)

    def _apply(self) -> None:
        """Move by g_t; where no count changes the table, that launch counts."""
        frame = self.frame
        layout, reducer, several = frame.layout, self.reducer, self.options.round_steps > 1
        target, places, rounding = frame.parameters.dense, frame.places, frame.rounding
        if several:
            target, places, rounding = [self._round_start], self._flat_places, None
        if reducer.values is not None:
            values = self._going(reducer.values.view(layout.n_blocks, -1)).view(-1)
            add_values(target, places, values, False, reducer.flags, rounding)
        else:
            update, coef = Signs(reducer.bits, self._going(reducer.scale)), self._as_it_is
            counts = not several and rounding is None and not frame.coefficients.bias_correction
            counting = frame.coefficients.count(*frame.counters()) if counts else ()
            how = (reducer.flags, rounding, reducer.digest, None, *counting)
            apply_momentum(target, places, update, None, coef, *how)
        if several:  # also where the round was skipped
            add_values(frame.parameters.dense, frame.places, self._round_start, True, self.reducer.verdict.none, None)

    def _going(self, by_block: Tensor) -> Tensor:
        """Return a global update [B, ...] with 0 in tensors that no worker has a gradient of."""
        frame = self.frame
        if frame.absent is None:
            return by_block
        still = frame.absent[frame.places.block_tensor]
        return torch.where(still.view(-1, *[1] * (by_block.dim() - 1)), 0.0, by_block)

    # ---------------------------------------------------------------- what it keeps

    @property
    def _round_start(self) -> Tensor:
        return self._anchor[: self.frame.layout.numel]

    def state(self, compressed: bool) -> Sequence[StateTensor]:
        own: dict[str, Any] = {"of_rank": True, "published": True}
        return (
            StateTensor("momentum_buffer", "element", self.exp_avg, **own, wanted=self._has_momentum),
            StateTensor("exp_avg", "element", self.exp_avg, **own, wanted=self._adam),
            StateTensor("exp_avg_sq", "element", self.exp_avg_sq, **own, wanted=self._adam, not_negative=True),
            StateTensor("compensation", "element", self.reducer.compensation.whole, **own),
            StateTensor(
                "anchor", "element", self._round_start, **ANCHOR, wanted=self.options.round_steps > 1, published=True
            ),
        )

    def held(self) -> Sequence[Tensor]:
        return self._anchor, self._one, self._as_it_is

    def close(self) -> None:
        super().close()
        self.exp_avg, self.exp_avg_sq, self._anchor = (
            tensor.new_empty(0) for tensor in (self.exp_avg, self.exp_avg_sq, self._anchor)
        )

    def _counted(self) -> int:
        """Return how many rounds were not skipped, as far as this rank knows."""
        outcomes = self.frame.steps.outcomes
        return self.reducer.schedule.counted - sum(
            outcomes.seems_skipped(attempt) for attempt, _ in self.round.unsettled
        )

    def plain_state(self) -> dict[str, Any]:
        reducer = self.reducer
        rounds = {"rounds": reducer.schedule.rounds, "counted": self._counted(), "digest": int(folded(reducer.digest))}
        return rounds | {"flags": reducer.pending}

    def check_plain_state(self, header: Mapping[str, Any]) -> None:
        frame = self.frame
        inside = frame.cut()["inside"]
        here = (frame.ranks.transport.world_size, frame.layout.block_size, frame.layout.numel)
        saved = (header["world_size"], header["block_size"], header["line"])
        if header["inside"] != inside or (inside > 1 and saved != here):
            raise ValueError(
                f"the checkpoint was written with {header['world_size']} ranks, {header['inside']} in a node, and "
                f"block_size={header['block_size']}, but here they are {here[0]}, {inside} in a node, and "
                f"block_size={here[1]}; construct the optimizer as it was"
            )
        if header["local"] >= self.options.round_steps:
            raise ValueError(
                f"the checkpoint was written after {header['local']} local steps of a round, but local_steps is "
                f"{self.options.round_steps}; save at the end of a round, or keep local_steps"
            )

    def resume(self, header: Mapping[str, Any]) -> None:
        self.reducer.resume(header["rounds"], header["digest"], header["flags"], header.get("counted"))

    # ---------------------------------------------------------------- what users look at

    def compensation(self, param: Tensor) -> Tensor:
        """Return this rank's compensation c of one parameter, float32 of its shape; zeros after full precision."""
        i = self.frame.index(param)
        self.exchange.settle()
        return self.value_of("compensation", i).clone()

    def compensation_norm(self) -> float:
        """Return the norm of this rank's compensation; reads and writes it once."""
        self.exchange.settle()
        return float(self.reducer.compensation.whole.norm())

    def owed(self) -> float:
        """Return the norm of this rank's compensation over that of the last update."""
        self.reducer.settle()
        norm, update = float(self.reducer.compensation.whole.norm()), float(self.reducer.result().norm())
        return norm / update if update > 0 else math.inf if norm > 0 else 0.0

    def momentum(self, param: Tensor) -> Tensor:
        """Return this rank's own momentum of one parameter, float32 of its shape."""
        frame, i = self.frame, self.frame.index(param)
        if not self.exp_avg.numel():
            return torch.zeros_like(param, dtype=torch.float32)
        return frame.parameters.shaped(self.exp_avg, i, frame.layout.offset(i)).clone()

    def stats(self) -> dict[str, Any]:
        return {"rounds": self.reducer.schedule.rounds}

    def described(self) -> list[str]:
        options = self.options
        assert isinstance(options, MarsitOptions)
        every = options.rounds.full_precision_every
        often = f"every {every} rounds" if every else "never"
        return [f"topology: {options.topology}, full precision {often}", f"local_steps: {options.round_steps}"]


class AdaptiveMarsit(Marsit):
    """Marsit, with the local updates of Adam."""

    traits: ClassVar = Marsit.traits._replace(settings=MarsitAdamOptions)
