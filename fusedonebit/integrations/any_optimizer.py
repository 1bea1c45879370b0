"""Compression for any optimizer, in one line."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comm import Format, agree, make_transport
from ..core.compression import Feedback, check_form, form_of, trained
from ..core.consensus import failure
from ..core.first_contact import LOGGER
from .bucket_averages import BucketAverages
from .seat import Seat, check_free

if TYPE_CHECKING:
    from .fsdp_compression import FsdpCompression


def compress(
    model: nn.Module,
    bits: int = 4,
    *,
    feedback: Feedback = "default",
    scaler: torch.amp.GradScaler | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> DdpCompression | FsdpCompression:
    """Send the gradients of a model in DDP or FSDP2 at 8, 4 or 1 bits per element, whatever optimizer follows.

    ::

        compression = fusedonebit.compress(model, bits=4)

    In DDP buckets are averaged during the backward pass, as DDP does, by two collectives on packed bytes each; all
    ranks get the same bits. In FSDP2 each reduce-scatter is one collective, and what arrives is added in float32. What
    quantisation leaves of a parameter's gradient is kept, and sent the next time. Clipping and GradScaler come after
    that, as ever. A gradient that is not finite becomes NaN on all ranks, with all that travels with it, whose
    residuals stay as they were. Call it on every rank, before the first backward pass.

    At one bit any optimizer gets gradients that are signs and errors of former steps: Adam's variance is made of those.
    OneBitAdam and its kin, which compress what they have made of gradients, lose far less; see the page on compression.

    Args:
        model: In ``DistributedDataParallel``, without ``mixed_precision`` or a communication hook, or
            ``fully_shard``'ed over a mesh of one dimension.
        bits: 8, 4 or 1, of each element; a block of 256, or of 1024 at one bit, has a scale of 16.
        feedback: In what residuals are kept, by each rank of all gradients and of the share that it averages: "fp32",
            "bf16", or "8bit". None: nothing is kept, and rounding is stochastic; not at one bit. The default is "bf16"
            in DDP; in FSDP2, where residuals are of unsharded gradients, it is None, or "bf16" at one bit.
        scaler: The GradScaler that is used, if one is: residuals are then of unscaled gradients, so that they hold when
            its scale changes.
        replicas: Of FSDP2's shards, the ranks that have the same: these average what they have received, in as many
            bits.

    Returns:
        What ``detach()`` ends; ``fusedonebit.dcp.save(..., compression=it)`` saves it.

    Raises:
        TypeError, ValueError, RuntimeError: on every rank, for arguments that are none of these, or differ between
            ranks, and where gradients are averaged in another way already; nothing was changed.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile has returned, as accelerate prepares models
    error = failure(lambda: _check(model, bits, feedback, scaler, replicas))
    facts = [("bits of compress()", str(bits)), ("feedback of compress()", str(feedback))]
    facts += [("whether compress() has a scaler", str(scaler is not None))]
    facts += [("whether compress() has replicas", str(replicas is not None))]
    if isinstance(model, DistributedDataParallel):
        facts += trained((name, p.shape) for name, p in model.named_parameters() if p.requires_grad)
    group, device = _ranks(model)
    ranks = make_transport(group, device)
    agree(ranks, facts, device, error, "call compress() alike on every rank")
    made: DdpCompression | FsdpCompression
    if isinstance(model, DistributedDataParallel):
        made = DdpCompression(model, form_of(bits, feedback), scaler)
    else:
        from .fsdp_compression import FsdpCompression

        made = FsdpCompression(model, ranks, replicas, form_of(bits, feedback, sharded=True), scaler)
    if ranks.rank == 0:
        LOGGER.info("%r", made)
    return made


def _ranks(model: Any) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return the ranks that have a part of a model, None if all have or it has no such, and where gradients are."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group, next(model.parameters()).device
    from .fsdp_groups import groups_of, ranks_of

    groups = groups_of(model) if isinstance(model, nn.Module) and dist.is_initialized() else []
    return (ranks_of(groups), groups[0].device) if groups else (None, torch.device("cpu"))


class DdpCompression(BucketAverages):
    """Averages all of a DDP model's gradients; ``fusedonebit.compress`` makes it, ``detach`` ends it.

    The model keeps it.
    """

    name = "compress()"
    averages_as_ddp = True

    def __init__(self, model: DistributedDataParallel, form: Format, scaler: torch.amp.GradScaler | None) -> None:
        super().__init__(model, model.module.named_parameters(), form, scaler)
        self._model = weakref.ref(model)
        Seat.take(model, self)

    def detach(self) -> None:
        """Let DDP average as it does without a hook."""
        model = self._model()
        if model is not None and (seat := Seat.of(model)) is not None and seat.taken_by is self:
            try:
                self.agree_to_end(self.ranks)
            finally:
                Seat.leave(model)
                self.close()


def _check(model: Any, bits: Any, feedback: Any, scaler: Any, replicas: Any) -> None:
    check_form(bits, feedback)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if isinstance(model, DistributedDataParallel):
        check_free(model)
        if replicas is not None:
            raise ValueError("replicas must be None for a model in DistributedDataParallel, whose ranks are all alike")
    else:
        from .fsdp_compression import check_sharded

        check_sharded(model, replicas, form_of(bits, feedback, sharded=True))
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name} must be made with sparse=False, got sparse=True: its gradients have no fixed size"
            )
    if len(devices := {p.device for p in model.parameters()}) > 1:
        raise ValueError(f"model must be on one device in each process, got {sorted(map(str, devices))}")
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"parameters must be float32, bfloat16 or float16, got {p.dtype} of {name}")
