"""The ranks that have a part in an optimizer's steps, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm import ModelGroup, ShardGroup, TorchTransport, Transport, agree, make_transport
from ..comm.agreement import Fact
from .consensus import failure
from .rank_local import Rows


class World:
    """All ranks with which this one takes steps.

    Args:
        transport: Connects those that average.
        device: Where tensors lie.
        parts: Connect those that hold other parts of this rank's model, from inside out.
        mesh: Over which parameters are sharded; None: they are whole.
        levels: Connect the nodes, and the ranks inside one; None: there is one level.

    Attributes:
        shards: Those that hold the other shards.
        model_parallel: Those of ``parts``.
        model: Both.
        traffics: What counts bytes that steps send.
        saving_group: Over which ranks talk while they save in the background; None: they have not.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        parts: Sequence[Transport] = (),
        mesh: DeviceMesh | None = None,
        levels: tuple[Transport, Transport] | None = None,
    ) -> None:
        self.transport, self.device = transport, device
        self.shards = ShardGroup() if mesh is None else ShardGroup(make_transport(mesh.get_group(), device))
        self.model_parallel = ModelGroup(*map(ShardGroup, parts))
        self.model = ModelGroup(self.shards, *self.model_parallel.groups)
        self.saving_group: dist.ProcessGroup | None = None
        self.take_levels(levels)

    @cached_property
    def apart(self) -> Transport:
        """Return a transport between those that average which nobody else uses, so that nothing comes between messages.

        All ranks make it.
        """
        return self.transport.apart() if isinstance(self.transport, TorchTransport) else self.transport

    @cached_property
    def rows(self) -> Rows:
        """Return the grid of ranks, of which state that differs from rank to rank has a row each; all make it."""
        rows = Rows(self.transport, self.shards, self.device)
        _ = rows.mesh  # now: later one rank may ask for a state_dict() alone
        return rows

    def take_levels(self, levels: tuple[Transport, Transport] | None) -> None:
        """Average in two levels, or in one; what model-parallel ranks send is counted as sent inside."""
        self.levels = levels
        for group in self.model_parallel.groups:
            group.transport.traffic = self.inside.traffic
        self.traffics = {id(each): each for each in (self.transport.traffic, self.inside.traffic)}.values()

    @property
    def inside(self) -> Transport:
        """Return what connects the ranks of one node, or of one replica."""
        return self.shards.transport if self.levels is None else self.levels[1]

    @property
    def single(self) -> bool:
        """Tell whether this rank is alone with its parameters: it averages with nobody, and nobody has other parts."""
        return self.transport.world_size == self.model.count == 1

    def agree(
        self,
        facts: list[Fact],
        of_shards: Sequence[Fact] = (),
        error: Exception | None = None,
        hint: str = "",
        of_model: Sequence[Fact] = (),
        of_replicas: Sequence[Fact] = (),
    ) -> None:
        """Return on all ranks, or raise on all.

        ``of_shards`` is what ranks with other shards have alike too, ``of_model`` all that hold parts of the model, and
        ``of_replicas`` those of them that hold some of its parameters alike.
        """
        error = failure(lambda: agree(self.transport, facts, self.device, error, hint))
        error = failure(lambda: agree(self.shards.transport, of_shards, self.device, error, hint, "shard"))
        for group in self.model_parallel.groups:
            error = self.disagreement(group, [*of_model, *of_replicas], error, hint)
            of_replicas = ()
        if error is not None:
            raise error

    def disagreement(
        self, group: ShardGroup, facts: Sequence[Fact], error: Exception | None, hint: str
    ) -> Exception | None:
        """Return what all model-parallel ranks of a group raise, unless they state the same and none has an error."""
        hint += f"{'; ' * bool(hint)}set tensor_model_parallel = True on a plain tensor that is a shard"
        return failure(lambda: agree(group.transport, facts, self.device, error, hint, "model-parallel rank"))
