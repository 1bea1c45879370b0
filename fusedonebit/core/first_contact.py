"""Says what an optimizer has chosen, and looks at its first steps for mistakes that raise no error, and never would.

Rank 0 alone speaks, once. After the second step nothing is looked at any more.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import warn
from .settings import Ranks
from .sharding import is_dtensor

if TYPE_CHECKING:
    from .frame import Frame

T = TypeVar("T")

LOGGER = logging.getLogger("fusedonebit")

LOOKED_AT = 2
"""Steps."""

SAME = 3e-5
"""Relative difference below which two norms are one: ``clip_grad_norm_`` adds 1e-6 to the norm by which it divides."""

NOTHING_TRAINS = (
    "no parameter of this {} requires gradients, so that step() changes nothing: pass model.parameters(), not the "
    "tensors of a state_dict(), or add_param_group() what is to train"
)
NO_GRADIENT = (
    "step() found no gradient of any parameter and changed nothing: call loss.backward() before step(), and "
    "zero_grad() after it, not between them; if you do, the optimizer's parameters are another model's than the one "
    "you train"
)
ADDED_UP = (
    "the second backward pass has added its gradients to those of the first step: call optimizer.zero_grad() after "
    "each step(). Who overwrites gradients in place can ignore this"
)
CLIPPED = (
    "the gradients of both first steps have the norm {norm:.3g}, so somebody has clipped them, as "
    "torch.nn.utils.clip_grad_norm_() does. In the compression stage each rank would clip its own gradients by its own "
    "norm, which changes their mean: leave that out, and pass max_grad_norm={norm:.3g} to {name}"
)
SHARED = (
    "{other} trains {count} of the parameters of a model of which {name} trains the others, and there is no "
    "DistributedDataParallel that averages their gradients: ranks will part. Give {name} all of them, in groups where "
    "they need different options; who averages those gradients by hand can ignore this"
)


def speaks(frame: Frame) -> bool:
    """Tell whether this is the rank that speaks for all."""
    ranks = frame.ranks
    return all(each.rank == 0 for each in (ranks.transport, *(group.transport for group in ranks.model.groups)))


def introduce(frame: Frame, chosen: Sequence[str], process_group: Ranks) -> None:
    """Log what a new optimizer has ``chosen``, and warn of what is legal, but hardly meant."""
    alone = frame.ranks.transport.world_size == 1
    if isinstance(process_group, dist.ProcessGroup) and alone and dist.get_rank() == 0 and dist.get_world_size() > 1:
        warn(
            f"process_group has this rank alone, of {dist.get_world_size()}: nothing is averaged, and each such rank "
            "trains a model of its own. Leave process_group out to average over all ranks"
        )
    if not speaks(frame):
        return
    for group in frame.groups:
        beta1, beta2 = map(float, group.get("betas", (0.0, 0.0)))
        if "eps" in group and beta1 > beta2:  # Lion, which has none, has no variance either
            warn(
                f"betas[0], the momentum's, is larger than the variance's: got ({beta1:g}, {beta2:g}); did you mean "
                f"({beta2:g}, {beta1:g})?"
            )
            break
    # Constructors of torch say nothing, and so does this one, unless the program listens: logging.basicConfig(
    # level=logging.INFO). ``print(optimizer)`` says the same, and more.
    if LOGGER.isEnabledFor(logging.INFO):
        count = frame.layout.real_numel
        LOGGER.info("%s of %s parameters: %s", frame.name, f"{count:,}", "; ".join(chosen))


class FirstSteps:
    """Checks of the first steps for mistakes such as clipped gradients, and what they have already warned of."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # norm and sum of the gradients of each step
        self.looked_at, self.over = 0, False  # whether there is nothing left to look at
        self._told: set[str] = set()

    def look(self, frame: Frame, grads: Sequence[Tensor], added_up: bool, averaged: bool) -> list[str]:
        """Return what to say of a step that is about to be taken on this rank's ``grads``; waits for the device.

        ``added_up``: see ``StepCount``; ``averaged``: whether DDP has averaged them unasked, of which all is said.
        """
        self.looked_at += 1
        self.over = self.looked_at >= LOOKED_AT
        # Where graphs replay backward passes, gradients have their memory for good, and are overwritten.
        found = [ADDED_UP] if added_up and not frame.options.wire.capturable else []
        present = [g for g in grads if g.numel()]
        if self.looked_at == 1 and dist.is_initialized() and frame.ranks.transport.world_size > 1:
            found += trained_by_others(frame)
        # One rank alone may be clipped by anybody; of a shard nobody knows the norm.
        if frame.ranks.transport.world_size > 1 and frame.ranks.shards.count == 1 and present:
            norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in present]).norm()
            total = torch.stack([g.sum(dtype=torch.float32) for g in present]).sum()
            self._seen = [*self._seen, (float(norm), float(total))]
            if clipped(self._seen) and not averaged:
                found.append(CLIPPED.format(norm=self._seen[-1][0], name=frame.name))
        return found

    def say(self, frame: Frame, found: Sequence[str]) -> None:
        """Log a warning for each text that was not said before."""
        for text in found:
            if text not in self._told and speaks(frame):
                warn(text)
            self._told.add(text)


def trained_by_others(frame: Frame) -> list[str]:
    """Return what to say of other optimizers that train parameters of the same model, whose gradients nobody averages.

    All objects are looked through, as no parameter knows its module. On simulated ranks, or over MPI, nobody looks.
    """
    modules = [module for module in instances(nn.Module) if "_modules" in vars(module)]  # a failed one lacks that
    inside = {id(child) for module in modules for child in module.children()}
    ours, exposed, averaged = set(map(id, frame.parameters.owners)), set[int](), set[int]()
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            averaged |= set(map(id, module.parameters()))
        elif id(module) not in inside:
            params = {id(p) for p in module.parameters() if p.grad is not None and not is_dtensor(p)}
            exposed |= params - ours if params & ours else set()
    exposed -= averaged
    counts = [
        (type(other).__name__, sum(id(p) in exposed for group in other.param_groups for p in group["params"]))
        for other in (instances(torch.optim.Optimizer) if exposed else ())
        if not (hasattr(other, "frame") or hasattr(other, "transport")) and hasattr(other, "param_groups")
    ]
    name = frame.name
    return [SHARED.format(other=other, count=count, name=name) for other, count in counts if count]


def instances(kind: type[T]) -> list[T]:
    """Return all objects of a kind that the garbage collector knows of: some 40 ms."""
    objects = gc.get_objects()
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds]


def clipped(seen: Sequence[tuple[float, float]]) -> bool:
    """Tell whether different gradients, of these norms and sums, have one round norm, as clipping makes it."""
    if len(seen) < LOOKED_AT:
        return False
    (first, one), (second, other) = seen
    is_round = math.isclose(second, float(f"{second:.3g}"), rel_tol=SAME)
    return 0 < first < math.inf and math.isclose(first, second, rel_tol=SAME) and one != other and is_round
