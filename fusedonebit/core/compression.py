"""What compression for DDP and for FSDP2 has in common: forms, what all ranks raise together, states of each rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..comm import DisagreementError, Format, Transport, agree
from ..comm.agreement import Fact
from ..comm.quantised import FEEDBACK, REFUSED, Exchange
from ..triton_kernels.nouns import Stored
from .world import World

Feedback = Literal["default", "fp32", "bf16", "8bit"] | None
"""In what residuals are kept; None: nowhere. ``compress`` says what the default is."""
BITS = (8, 4, 1)


def check_form(bits: Any, feedback: Any) -> None:
    """Raise ValueError unless gradients can travel so."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {bits!r}; for 16, torch's bf16_compress_hook")
    if feedback not in (None, "default", *FEEDBACK):
        raise ValueError(f"feedback must be one of {(*FEEDBACK, None)}, got {feedback!r}")
    if bits == 1 and feedback is None:
        raise ValueError("feedback must be 'fp32', 'bf16' or '8bit' at one bit, got None: signs alone have no mean")


def form_of(bits: int, feedback: Feedback, sharded: bool = False) -> Format:
    """Return how gradients travel; "default" is "bf16", and None where residuals would be of unsharded gradients."""
    default = None if sharded and bits > 1 else "bf16"
    return Format(bits, default if feedback == "default" else feedback)


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""


def plain(name: str) -> str:
    """Return the name of a parameter without those of wrappers around its modules."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def trained(params: Iterable[tuple[str, Sequence[int]]]) -> list[Fact]:
    """Return what ranks that average must have alike: names and shapes of the parameters that are trained."""
    return [(f"the shape of {name} that is trained", str(tuple(shape))) for name, shape in params]


class Told(NamedTuple):
    """The flags of an exchange, as the host will know them.

    Attributes:
        flags: int32 [1], on the host.
        event: After which they are there; None: they are.
        exchanges: Of one group of gradients, one after the other; the last has what any has found.
        error: What has kept this rank from taking part.
    """

    flags: Tensor
    event: torch.cuda.Event | None
    exchanges: Sequence[Exchange]
    error: Exception | None


class Compression:
    """Compresses gradients: a base class.

    Args:
        form: How they travel.
        ranks: All that share a checkpoint.
        device: Where gradients are.
        scaler: A GradScaler, in whose unit they are; None: none.

    Attributes:
        number: Of the last backward pass, or of FSDP2 of the last exchange in it, an int32.
        hint: What to do where ranks differ.
    """

    hint = "Every rank must run as many backward passes, of the same model"
    sharded = False
    """Whether residuals are of gradients that no rank has for long."""

    def __init__(
        self, form: Format, ranks: Transport, device: torch.device, scaler: torch.amp.GradScaler | None
    ) -> None:
        self.form, self.ranks, self.device, self.number = form, ranks, device, 0
        self._scaler = scaler
        self._told: dict[Any, Told] = {}

    def is_like(self, bits: int, feedback: Feedback, scaler: torch.amp.GradScaler | None) -> bool:
        """Return whether the same arguments would make such a one again."""
        return self._scaler is scaler and self.form == form_of(bits, feedback, self.sharded)

    @property
    def unit(self) -> Tensor | None:
        """Return what the loss is multiplied with."""
        scaler = self._scaler
        return None if scaler is None or not scaler.is_enabled() else scaler._scale

    @cached_property
    def world(self) -> World:
        """Return the ranks over which a checkpoint of another's optimizer is written."""
        return World(self.ranks, self.device)

    def note(self, of: Any, exchanges: Sequence[Exchange], error: Exception | None = None) -> None:
        """Look at the flags of the last exchange: on a CPU at once, on CUDA before the next, so as not to wait.

        Args:
            of: Whose gradients they were, for ``raise_what_was_told``.
            exchanges: One after the other.
            error: What has kept this rank from taking part in them.
        """
        flags, event = exchanges[-1].flags, None
        if self.device.type == "cuda":
            flags = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(flags, non_blocking=True)
            event = torch.cuda.current_stream(self.device).record_event()
        self._told[of] = Told(flags, event, list(exchanges), error)
        if event is None:
            self.raise_what_was_told()

    def raise_what_was_told(self, of: Any = None) -> None:
        """Raise, on all ranks, if exchanges that are over went wrong, all or somebody's: DisagreementError, or why."""
        for each in list(self._told) if of is None else [of] if of in self._told else []:
            told = self._told.pop(each)
            if told.event is not None:
                told.event.synchronize()  # of a pass ago
            if not int(told.flags) & REFUSED:
                continue
            if told.error is not None:
                raise told.error
            first = next(exchange for exchange in told.exchanges if int(exchange.flags) & REFUSED)
            raise DisagreementError(
                f"gradients can't be averaged: {first.describe()}; those of this pass are NaN, and no residual is "
                f"lost. {self.hint}"
            )

    def detach(self) -> None:
        """End it; what is left is lost. Call it on every rank, between two steps; a second call does nothing.

        Raises:
            DisagreementError: on every rank, if ranks are not between the same two steps; it has ended all the same.
        """
        raise NotImplementedError

    def agree_to_end(self, ranks: Transport) -> None:
        """Return on all of some ranks if they are between the same two steps; else raise on all."""
        facts = [("the number of exchanges before detach()", str(self.number))]
        agree(ranks, facts, self.device, None, "call it on every rank, between the same two steps")

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

    def add(self, about: Mapping[str, Any], rank: int, state: Mapping[str, Tensor]) -> None:
        """Add those of a rank, weighed so that they count in a mean over these ranks as they did."""
        raise NotImplementedError

    def forget(self) -> None:
        """Have none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, by names that begin with its number, and ``about``, the same on all.

        Raises:
            DisagreementError: on all ranks, if the last pass went wrong: its gradients are none.
        """
        self.raise_what_was_told()
        world_size, rank = self.ranks.world_size, self.ranks.rank
        about = {"kind": type(self).__name__, "world_size": world_size, "form": list(self.form)}
        about |= {"number": self.number} | self.facts()
        return {"about": json.dumps(about)} | {f"{rank}.{name}": x for name, x in self.tensors().items()}

    def template(self, saved: str) -> dict[str, Any]:
        """Return room for what this rank wants of a state whose ``about`` is ``saved``; ValueError if of another model.

        That is its own, or where as many ranks have saved that others' are left over, or none, a share of these.
        """
        about, room = json.loads(saved), {"about": ""}  # type: Any, dict[str, Any]
        if about["kind"] != type(self).__name__:
            raise ValueError(
                f"the checkpoint's residuals must be of {type(self).__name__}, got {about['kind']}'s, of a model that "
                "was wrapped in another way; leave compression= out to drop them"
            )
        if (kept := Format(*about["form"]).feedback) is not None and self.form.feedback is None:
            raise ValueError(
                f"feedback must keep residuals, got None, but the checkpoint has some, in {kept}: pass "
                f"feedback={kept!r} to compress(), or leave compression= out to drop them"
            )
        for rank in self.whose(saved):
            room |= {f"{rank}.{name}": x for name, x in self.room_for(about, rank).items()}
        return room

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a filled ``template``: what is left of each parameter stays the same, added up over ranks.

        Raises:
            ValueError: if it is of another model, or of no compression; nothing was changed.
        """
        self.check(state)
        about = json.loads(state["about"])
        self.forget()
        self._told.clear()  # of passes before the load, whose gradients are gone
        self.number = about["number"]
        same = about["world_size"] == self.ranks.world_size and Format(*about["form"]) == self.form
        for rank in self.whose(state["about"]):
            own = {name.removeprefix(f"{rank}."): x for name, x in state.items() if name.startswith(f"{rank}.")}
            if same:
                self.take(about, own)
            else:
                self.add(about, rank, own)

    def whose(self, saved: str) -> range:
        """Return of which ranks this one takes what they have left, in a state whose ``about`` is ``saved``."""
        return range(self.ranks.rank, json.loads(saved)["world_size"], self.ranks.world_size)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``load_state_dict`` can take a state."""
        if not isinstance(state.get("about"), str):
            raise ValueError(f"state must be what state_dict() of compression has returned, got one of {sorted(state)}")
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
