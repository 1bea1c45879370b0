"""Whole steps of the optimizers on a GPU: against eager, over several ranks, over NCCL, without waits."""

from __future__ import annotations

import io

import pytest
import torch
from gpu_runs import FREEZE, KINDS, Run, assert_equal, every_kind, without_waiting
from torch import Tensor

from fusedonebit import Lamb
from fusedonebit.comm import SimulatedGroup, Transport
from fusedonebit.triton_kernels import using

pytestmark = pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scope", ["global", "layer", "block"])
@every_kind
def test_30_steps_through_the_kernels_equal_30_through_eager(device, shapes, small_only, kind, scope, dtype):
    if small_only and kind != "adam" and scope != "block":
        pytest.skip("dry run: one scope is enough")
    results = []
    for backend in ("plain", "triton"):
        with using(backend):
            run = Run(device, shapes, dtype=dtype, scale_scope=scope, **KINDS[kind])
            results.append(run.steps(0, 30, nan_at=20))
            stats = run.optimizer.stats()
        assert ("Triton" in stats["backend"]) == (backend == "triton")
        assert (stats["step"], stats["skipped_steps"], stats["phase"]) == (29, 1, "compression")
    assert_equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lamb_through_the_kernels_equals_lamb_through_eager(device, shapes, dtype):
    results, layers = [], []
    for backend in ("plain", "triton"):
        with using(backend):
            run = Run(device, shapes, dtype=dtype, make=Lamb)
            results.append(run.steps(0, 30, nan_at=20))
            stats = run.optimizer.stats(layers=True)
        layers.append(stats["layers"])
        # On one rank alone it leaves out the element, not the step.
        assert (stats["step"], stats["skipped_steps"], stats["phase"]) == (30, 0, "uncompressed")
    assert_equal(*results)
    assert all(torch.isfinite(p).all() for p in results[0])
    for name in ("coefficient", "average", "ratio"):
        assert layers[0][name] == layers[1][name]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@every_kind
def test_simulated_ranks_stay_bit_identical_through_a_nan(device, shapes, kind, world_size):
    def each(rank: int, transport: Transport) -> tuple[list[Tensor], dict]:
        run = Run(device, shapes, rank, transport, **KINDS[kind])
        nan_at = 30 if rank == world_size - 1 else None
        return run.steps(0, 50, nan_at), run.optimizer.stats()

    # Triton's interpreter runs one thread at a time, a GPU all of them.
    with using("plain" if device.type == "cpu" else "triton"):
        results = SimulatedGroup(world_size).run(each)
    for params, stats in results:
        assert_equal(params, results[0][0])
        assert (stats["step"], stats["skipped_steps"], stats["phase"]) == (49, 1, "compression")
        assert stats["freeze_step"] == FREEZE
    assert all(torch.isfinite(p).all() for p in results[0][0])


@pytest.mark.cuda_only
@every_kind
def test_simulated_ranks_through_kernels_equal_eager_ones(device, shapes, kind):
    def each(rank: int, transport: Transport) -> list[Tensor]:
        return Run(device, shapes, rank, transport, scale_scope="layer", **KINDS[kind]).steps(0, 25)

    outcomes = []
    for backend in ("plain", "triton"):
        with using(backend):
            outcomes.append(SimulatedGroup(4).run(each)[0])
    assert_equal(*outcomes)


@pytest.mark.cuda_only
@every_kind
def test_nccl_at_world_size_1_equals_a_run_without_collectives(device, shapes, nccl, kind):
    expected = Run(device, shapes, **KINDS[kind]).steps(0, 30, nan_at=20)
    run = Run(device, shapes, transport=nccl(), **KINDS[kind])
    assert "nccl" in run.optimizer.stats()["transport"]
    assert_equal(run.steps(0, 30, nan_at=20), expected)
    assert run.optimizer.stats()["collectives_step"] == 0  # one rank has nobody to talk to


WAYS = ("global", "layer", "block", "rate on the device", "nccl")


@pytest.mark.cuda_only
@pytest.mark.parametrize(("kind", "how"), [*((kind, how) for kind in KINDS for how in WAYS), ("uncompressed", "")])
def test_a_step_never_waits_for_the_device(device, shapes, request, kind, how):
    options = dict(KINDS.get(kind, {"make": Lamb}))
    if how == "nccl":
        options["transport"] = request.getfixturevalue("nccl")()
    elif how == "rate on the device":
        options["lr"] = torch.tensor(1e-2, device=device)
    elif how:
        options["scale_scope"] = how
    run = Run(device, shapes, **options)
    run.steps(0, FREEZE + 5)
    assert run.optimizer.phase == ("uncompressed" if kind == "uncompressed" else "compression")
    run.set_gradients(99)
    with without_waiting():
        for _ in range(3):
            run.optimizer.step()
    assert run.optimizer.stats()["step"] == FREEZE + 8


@pytest.mark.cuda_only
@every_kind
def test_compressed_steps_allocate_nothing_of_full_size(device, kind):
    n = 1 << 24
    run = Run(device, ((n,),), freeze_step=1, **KINDS[kind])
    run.steps(0, 3)
    run.set_gradients(3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.optimizer.step()
    assert run.optimizer.phase == "compression"
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < n / 4, f"{grown} bytes for {n} parameters"


@pytest.mark.parametrize("saved_after", [FREEZE // 2, FREEZE + 6])
@every_kind
def test_a_checkpoint_resumes_with_the_same_bits(device, shapes, kind, saved_after):
    run = Run(device, shapes, **KINDS[kind])
    params = run.steps(0, saved_after)
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    expected = run.steps(saved_after, saved_after + 12)
    file.seek(0)
    other = Run(device, shapes, **KINDS[kind])
    with torch.no_grad():
        for p, value in zip(other.params, params, strict=True):
            p.copy_(value)
    other.optimizer.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    assert_equal(other.steps(saved_after, saved_after + 12), expected)
    assert other.optimizer.stats()["step"] == saved_after + 12
