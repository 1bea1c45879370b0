"""What compression for DDP and for FSDP2 has in common: forms, what all ranks raise together, states of each rank."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..comm import DisagreementError, Flag, Format, Transport
from ..comm.quantised import FEEDBACK, Exchange
from ..triton_kernels.nouns import Stored
from .world import World

Feedback = Literal["default", "fp32", "bf16", "8bit"] | None
"""In what residuals are kept; None: nowhere. ``compress`` says what the default is."""
BITS = (8, 4, 1)
REFUSED = sum(Flag) & ~int(Flag.NONFINITE)
"""Flags for which all ranks raise: all but that of a gradient that is not finite."""


def check_form(bits: Any, feedback: Any) -> None:
    """Raise ValueError unless gradients can travel so."""
    if bits not in BITS or isinstance(bits, bool):
        raise ValueError(f"bits must be one of {BITS}, got {bits!r}; for 16, torch's bf16_compress_hook")
    if feedback not in (None, "default", *FEEDBACK):
        raise ValueError(f"feedback must be one of {(*FEEDBACK, None)}, got {feedback!r}")
    if bits == 1 and feedback is None:
        raise ValueError("feedback must be 'fp32', 'bf16' or '8bit' at one bit, got None: signs alone have no mean")


def form_of(bits: int, feedback: Feedback, sharded: bool = False) -> Format:
    """Return how gradients travel; "default" is "bf16", and None where residuals would be of unsharded gradients."""
    default = None if sharded and bits > 1 else "bf16"
    return Format(bits, default if feedback == "default" else feedback)


class Compression:
    """Compresses gradients: a base class.

    Args:
        form: How they travel.
        ranks: All that share a checkpoint.
        device: Where gradients are.
        scaler: A GradScaler, in whose unit they are; None: none.

    Attributes:
        number: Of backward passes so far, an int32.
    """

    def __init__(
        self, form: Format, ranks: Transport, device: torch.device, scaler: torch.amp.GradScaler | None
    ) -> None:
        self.form, self.ranks, self.device, self.number = form, ranks, device, 0
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._told: dict[Exchange, tuple[Tensor, Any]] = {}

    @property
    def unit(self) -> Tensor | None:
        """Return what the loss is multiplied with."""
        scaler = None if self._scaler is None else self._scaler()
        return None if scaler is None or not scaler.is_enabled() else scaler._scale

    @cached_property
    def world(self) -> World:
        """Return the ranks over which a checkpoint of another's optimizer is written."""
        return World(self.ranks, self.device)

    def note(self, exchange: Exchange) -> None:
        """Look at the flags of an exchange: on a CPU at once, on CUDA before the next, so as not to wait."""
        flags, event = exchange.flags, None
        if self.device.type == "cuda":
            flags = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(exchange.flags, non_blocking=True)
            event = torch.cuda.current_stream(self.device).record_event()
        self._told[exchange] = flags, event
        if event is None:
            self.raise_what_was_told()

    def raise_what_was_told(self, of: Exchange | None = None) -> None:
        """Raise DisagreementError, on all ranks, if exchanges that are over went wrong: all, or one."""
        for exchange in list(self._told) if of is None else [of] if of in self._told else []:
            flags, event = self._told.pop(exchange)
            if event is not None:
                event.synchronize()  # of a pass ago
            if int(flags) & REFUSED:
                raise DisagreementError(
                    f"gradients can't be averaged: {exchange.describe()}; those of this pass are NaN, and no residual "
                    "is lost. Every rank must run as many backward passes, of the same model"
                )

    def detach(self) -> None:
        """End it; what is left is lost. Call it on every rank, between two steps; a second call does nothing."""
        raise NotImplementedError

    def bytes_kept(self) -> int:
        """Return the bytes of this rank's residuals."""
        raise NotImplementedError

    def __repr__(self) -> str:
        kept = f"residuals in {self.form.feedback}, {self.bytes_kept():,} bytes on each rank"
        return f"compress(bits={self.form.bits}): {kept if self.form.feedback else 'stochastic rounding, no residuals'}"

    # ------------------------------------------------------------ checkpoints

    def facts(self) -> dict[str, Any]:
        """Return what else must be known of a state to load it."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's residuals by name."""
        raise NotImplementedError

    def room_for(self, about: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
        """Return room for those of any rank, in the form and on as many ranks as ``about`` says; or ValueError."""
        raise NotImplementedError

    def take(self, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """Take this rank's, as they were: of the same form, and on as many ranks."""
        raise NotImplementedError

    def add(self, about: Mapping[str, Any], rank: int, state: Mapping[str, Tensor], share: float) -> None:
        """Add ``share`` times those of a rank."""
        raise NotImplementedError

    def forget(self) -> None:
        """Have none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, by names that begin with its number, and ``about``, the same on all."""
        world_size, rank = self.ranks.world_size, self.ranks.rank
        about = {"world_size": world_size, "form": list(self.form), "number": self.number} | self.facts()
        return {"about": json.dumps(about)} | {f"{rank}.{name}": x for name, x in self.tensors().items()}

    def template(self, saved: str) -> dict[str, Any]:
        """Return room for what this rank wants of a state whose ``about`` is ``saved``; ValueError if of another model.

        That is its own, or where as many ranks have saved that others' are left over, or none, a share of these.
        """
        about, room = json.loads(saved), {"about": ""}  # type: Any, dict[str, Any]
        for rank in self.whose(saved):
            room |= {f"{rank}.{name}": x for name, x in self.room_for(about, rank).items()}
        return room

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a filled ``template``: what is left of each parameter stays the same, added up over ranks."""
        about = json.loads(state["about"])
        self.forget()
        self.number = about["number"]
        same = about["world_size"] == self.ranks.world_size and Format(*about["form"]) == self.form
        for rank in self.whose(state["about"]):
            own = {name.removeprefix(f"{rank}."): x for name, x in state.items() if name.startswith(f"{rank}.")}
            if same:
                self.take(about, own)
            else:  # a mean over other numbers of ranks weighs otherwise
                self.add(about, rank, own, self.ranks.world_size / about["world_size"])

    def whose(self, saved: str) -> range:
        """Return of which ranks this one takes what they have left, in a state whose ``about`` is ``saved``."""
        return range(self.ranks.rank, json.loads(saved)["world_size"], self.ranks.world_size)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``load_state_dict`` can take a state."""
        room = self.template(state["about"])
        wanted, given = ({k: tuple(x.shape) for k, x in of.items() if k != "about"} for of in (room, state))
        if wrong := sorted(k for k in wanted | given if wanted.get(k) != given.get(k)):
            k = wrong[0]
            raise ValueError(f"compression of another model: {k} has shape {given.get(k)}, here {wanted.get(k)}")


def named(prefix: str, sides: Mapping[str, Stored | None]) -> dict[str, Tensor]:
    """Return what an exchange has left, by name."""
    parts = {f"{prefix}.{side}.{k}": x for side, of in sides.items() if of for k, x in of._asdict().items()}
    return {name: x for name, x in parts.items() if x is not None}


def stored_in(state: Mapping[str, Tensor], prefix: str) -> Stored | None:
    """Return one side of what ``named`` has made."""
    numbers = state.get(f"{prefix}.numbers")
    return None if numbers is None else Stored(numbers, state.get(f"{prefix}.exponents"))


def fill(sides: Mapping[str, Stored | None], state: Mapping[str, Tensor], prefix: str) -> None:
    """Copy what ``named`` has made of an exchange to another's sides."""
    for name, x in named(prefix, sides).items():
        x.copy_(state[name])


def pieces(into: dict[str, Tensor], of: Iterable[tuple[str, Tensor]], share: float = 1.0) -> None:
    """Add what is left of parameters to what waits for their next exchange."""
    for name, x in of:
        into[name] = into[name] + share * x.to(into[name].device) if name in into else share * x
