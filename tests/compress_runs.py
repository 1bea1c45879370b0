"""Runs that send gradients in 8, 4 or 1 bits, beside an uncompressed twin of the model that says what was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from ddp_runs import Net, loss_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW

import fusedonebit
from fusedonebit.comm.quantised import owed
from fusedonebit.integrations.bucket_averages import BucketAverages
from fusedonebit.triton_kernels import FlatLayout

BUCKETS_MB = 0.002
"""Two buckets, other ones after the first pass."""
FORMS = ((8, "fp32"), (4, "fp32"), (1, "fp32"), (4, "bf16"), (8, "8bit"), (8, None), (4, None))
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda params: AdamW(params, 1e-2),
    "sgd": lambda params: SGD(params, 0.1, momentum=0.9),
    "adafactor": lambda params: Adafactor(params, 1e-2),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], 1e-2)


def whole(x: Tensor) -> Tensor:
    """An FSDP2 model's shards put together; others as they are."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def flat(model: nn.Module) -> Tensor:
    return torch.cat([whole(p).detach().float().flatten() for p in model.parameters()])


def wrapped(kind: str, bits: int, feedback: Any, scaler: Any = None, **wrap: Any) -> tuple[Any, Any]:
    """A model in "ddp", in "fsdp", or sharded by two ranks with "replicas"; and what compresses it."""
    torch.manual_seed(0)
    net, world_size = Net(), dist.get_world_size()
    if kind == "ddp":
        model = DistributedDataParallel(net, bucket_cap_mb=BUCKETS_MB, **wrap)
        return model, fusedonebit.compress(model, bits, feedback=feedback, scaler=scaler)
    replicas = 2 if kind == "replicas" else 1
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    for module in (net.side, net):
        fully_shard(module, mesh=mesh["shard"], **wrap)
    of = mesh["replicate"].get_group() if replicas > 1 else None
    return net, fusedonebit.compress(net, bits, feedback=feedback, scaler=scaler, replicas=of)


def left(compression: Any) -> dict[str, Tensor]:
    """What quantisation has left of each parameter on this rank; the sum over ranks, over their number, is owed."""
    if isinstance(compression, BucketAverages):
        found = {name: torch.zeros(n) for name, n in compression._sizes.items()} | dict(compression._left)
        for group, exchange in compression._exchanges.items():
            found |= dict(zip(group, exchange.owed(), strict=False))
        return found
    return {name: x for scatter in compression.scatters for name, x in _of_scatter(compression, scatter)}


def _of_scatter(compression: Any, scatter: Any) -> Iterable[tuple[str, Tensor]]:
    worker = next(iter(scatter.sums.values())).worker
    rows, block = owed(scatter.rows.layout(compression.form.block_size), 0, worker, None), compression.form.block_size
    for mean in scatter.means.values():
        layout = FlatLayout((scatter.rows.length,), compression.replicas.world_size, block)
        rows[scatter.ranks.rank] += (
            owed(layout, compression.replicas.rank, mean.worker, mean.server)[0] / scatter.factor
        )
    return zip(scatter.names, (x.flatten() for x in scatter.rows.split(rows)), strict=True)


def summed(x: Tensor) -> Tensor:
    x = x.double().clone()
    dist.all_reduce(x)
    return x


def lost(compression: Any, owed_of: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """The largest difference between the mean gradients, and those that came with what is left."""
    world_size, errors, kept = dist.get_world_size(), [], left(compression)
    for name in owed_of:
        errors.append(summed(owed_of[name].flatten() - kept[name].double()) / world_size - got[name].flatten())
    return max(float(error.abs().max()) for error in errors)


def conserves(rank: int, world_size: int, kind: str, bits: int, feedback: str, how: str, wrap: Mapping[str, Any]):
    """What 12 steps lose; and whether gradients were the same on all ranks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if how == "scaler" else None
    model, compression = wrapped(kind, bits, feedback, scaler, **wrap)
    torch.manual_seed(0)
    twin, same = Net(), True
    owed_of, got = ({n: torch.zeros_like(p, dtype=torch.float64) for n, p in twin.named_parameters()} for _ in "12")
    for step in range(12):
        # Nobody uses a layer in some steps, in one some ranks do.
        side = how != "unused" or (rank == 0 if step == 7 else step not in (0, 3, 4))
        unit = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
        for p in (*model.parameters(), *twin.parameters()):
            p.grad = None
        for micro in range(2 if how == "no_sync" else 1):
            (loss_of(twin, rank, step, micro, side) * unit).backward()
            loss = loss_of(model, rank, step, micro, side) * unit
            if how == "no_sync" and micro == 0:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        for (name, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
            if p.grad is not None:
                owed_of[name] += p.grad.double() / unit
            if q.grad is not None:
                got[name] += whole(q.grad).double() / unit
                each = [torch.empty_like(whole(q.grad)) for _ in range(world_size)]
                dist.all_gather(each, whole(q.grad).contiguous())
                same &= all(torch.equal(of_rank, each[0]) for of_rank in each)
        if scaler is not None:
            scaler.update(scaler._scale * (2.0 if step % 3 == 2 else 1.0))
    return lost(compression, owed_of, got), same


def resumes(rank: int, world_size: int, kind: str, form: tuple[int, str], path: str, begins: bool):
    """Five steps and a checkpoint, or that loaded; then four more: parameters at the end, and what was left between."""
    model, compression = wrapped(kind, *form)
    optimizer = AdamW(model.parameters(), 1e-2)
    if begins:
        train(model, optimizer, rank, range(5))
        fusedonebit.dcp.save(model, optimizer, path, compression=compression)
    else:
        fusedonebit.dcp.load(model, optimizer, path, compression=compression)
    total = {name: summed(x) / world_size for name, x in left(compression).items()}
    train(model, optimizer, rank, range(5, 9))
    return flat(model), total


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int], clip: float = 0
) -> float:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return float(loss.detach())


def trains(
    rank: int, world_size: int, kind: str, name: str, bits: int, steps: int
) -> tuple[float, float, Tensor, Tensor]:
    """The loss at the beginning and the end, with any optimizer, clipped; the parameters; a digest of all gradients."""
    model, _ = wrapped(kind, bits, "default")
    optimizer = OPTIMIZERS[name](model.parameters())
    digest = torch.zeros((), dtype=torch.int64)

    def digested(*_: Any) -> None:
        for p in model.parameters():
            digest.mul_(1_000_003).add_(whole(p.grad).contiguous().view(torch.int32).sum())

    optimizer.register_step_pre_hook(digested)
    first = float(loss_of(model, 100 + rank, 0).detach())
    train(model, optimizer, rank, range(steps), clip=1.0)
    return first, float(loss_of(model, 100 + rank, 0).detach()), flat(model), digest


def check_resuming(kind: str, form: Any, before: int, after: int, path: Any) -> None:
    """Bit for bit on as many ranks; on others what is left is the same."""
    (params, kept), *_ = run_ranks(resumes, before, kind, form, str(path), True)
    found = run_ranks(resumes, after, kind, form, str(path), False)
    assert all(torch.equal(of_rank, found[0][0]) for of_rank, _ in found)
    if before == after:
        assert torch.equal(found[0][0], params)
    for name, total in found[0][1].items():
        rounded = {"fp32": 1e-6, "bf16": 0.01, "8bit": 0.1}[form[1]]
        assert float((total - kept[name]).abs().max()) <= rounded * float(kept[name].abs().max())
