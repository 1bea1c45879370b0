"""Ternary compression, sign and zero in two bits (Tarasov & Ershov, section 4): whole runs, the wire."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from observe import change_header, fingerprint, observe
from op_arguments import Problem, wide
from op_formulas import sign
from optimizers import ADAM_AND_LAMB, PAPER, UNGUARDED, construct
from ranks import simulate
from torch.nn import Parameter

from fusedonebit import triton_kernels as ops
from fusedonebit.checkpoint import header_of
from fusedonebit.comm import CompressedAllReduce, Transport
from fusedonebit.triton_kernels import SCALE_NORMS, FlatLayout, using

# ---------------------------------------------------------------- one round, by hand


def test_a_round_of_five_numbers_is_what_one_works_out_by_hand():
    """Scales are means over what is not zero; a zero has no residual; -0.0 is a zero."""
    reduce = CompressedAllReduce(FlatLayout((5,), 1, 128), scale_norm="l1", ternary=True)
    reduce([torch.tensor([0.0, 3.0, -1.0, -0.0, 2.0])])
    # s = (3 + 1 + 2)/3 = 2, of the worker; what the server gets has three elements of size 2.
    assert reduce.result()[:5].tolist() == [0.0, 2.0, -2.0, 0.0, 2.0]
    assert not reduce.result()[5:].any()
    assert reduce.worker.norms() == pytest.approx((14**0.5, 2**0.5))
    assert reduce.server.norms() == pytest.approx((12**0.5, 0.0))
    assert reduce.gathered.bits[0, :, 0].tolist() == [0b11111011, 0b00010110]
    reduce.settle()
    assert reduce.worker.compensated[:5].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert reduce.worker.norms() == pytest.approx((14**0.5, 2**0.5))


def test_the_l2_scale_and_its_residual_count_what_is_not_zero():
    reduce = CompressedAllReduce(FlatLayout((5,), 1, 128), scale_norm="l2", ternary=True)
    reduce([torch.tensor([0.0, 3.0, -1.0, 0.0, 0.0])])
    s = 5**0.5  # of (9 + 1)/2
    assert reduce.worker.scale.tolist() == pytest.approx([s])
    assert reduce.worker.norms()[1] == pytest.approx(np.hypot(3 - s, 1 - s))


@pytest.mark.parametrize("norm", ["l1", "contractive"])
def test_scales_contract_what_is_mostly_zero(norm):
    """One element that stands out among zeros is sent exactly."""
    p = Problem((1000,), ternary=True, scope="global")
    for x in (p.compensated, p.worker_scale, p.exp_avg_scale, p.grads[0]):
        x.zero_()
    p.grads[0][7] = 2.0
    ops.momentum_compress(*p.arguments("momentum_compress"))
    arguments = p.arguments("finish", partials=p.partials, norm=SCALE_NORMS[norm])
    ops.finish(*arguments)
    c, s = wide(p.compensated), float(arguments.segments.measured[0])
    assert c[7] != 0
    assert not (c - s * sign(c, True)).any()


# ---------------------------------------------------------------- whole runs


SHAPES = ((7,), (20, 10), (0,), (1,), (150,))
STILL = 5  # every fifth coordinate has no gradient, ever, on any rank


def train(rank: int, transport: Transport, name: str, backend: str, options: dict) -> dict:
    """Trains 4 steps uncompressed and 10 compressed, of which one is skipped; tells how it went."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in SHAPES]
    before = [p.detach().clone() for p in params]
    generator = torch.Generator().manual_seed(rank)
    prints = []
    options = UNGUARDED | options | {"process_group": transport}
    optimizer = construct(name, params, 1e-2, freeze_step=4, weight_decay=0.0, **options)
    for step in range(14):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
            p.grad.view(-1)[::STILL] *= 0.0
            p.grad.view(-1)[rank :: 7 + step] = 0.0
        if step == 8 and rank == transport.world_size - 1:
            params[1].grad[3, 3] = torch.nan
        optimizer.step()
        prints.append(fingerprint(params))
    stats, state = optimizer.stats(), observe(optimizer)
    assert ("Triton" in stats["backend"]) == (backend == "triton")
    assert (stats["phase"], stats["skipped_steps"]) == ("compression", 1)
    return {"prints": prints, "state": state, "moved": [p.detach() != b for p, b in zip(params, before, strict=True)]}


def trained(world_size: int, name: str, backend: str, options: dict) -> list[dict]:
    with using(backend):
        return simulate(train, world_size, name, backend, options)


RUNS = [
    {},
    PAPER | {"scale_scope": "layer", "scale_norm": "contractive"},
    {"precondition": True, "scale_scope": "global", "scale_norm": "l1"},
]


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("onebit-adam", RUNS[0]),
        ("onebit-lamb", RUNS[1]),
        *(pytest.param("onebit-adam", run, marks=pytest.mark.full) for run in RUNS[1:]),
        *(pytest.param("onebit-lamb", run, marks=pytest.mark.full) for run in RUNS[2:]),
        pytest.param("onebit-lamb-frozen", {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_through_the_kernels_gives_identical_parameters(name, options):
    (plain,), (triton,) = (trained(1, name, backend, {"ternary": True} | options) for backend in ("plain", "triton"))
    assert plain["prints"] == triton["prints"]
    for key, value in plain["state"].items():
        np.testing.assert_array_equal(value, triton["state"][key])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@ADAM_AND_LAMB
def test_two_ranks_stay_bit_identical_through_the_kernels(name):
    runs = [trained(2, name, backend, {"ternary": True}) for backend in ("plain", "triton")]
    assert runs[0][0]["prints"] == runs[0][1]["prints"] == runs[1][0]["prints"] == runs[1][1]["prints"]
    assert len(set(runs[0][0]["prints"])) == 13  # one step was skipped


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
@pytest.mark.parametrize("options", RUNS, ids=str)
@ADAM_AND_LAMB
def test_a_coordinate_without_gradients_stays_still_if_ternary(name, options):
    ternary, onebit = (trained(2, name, "plain", {"ternary": t} | options)[0] for t in (True, False))
    assert not any(moved.view(-1)[::STILL].any() for moved in ternary["moved"])
    assert any(moved.view(-1)[::STILL].any() for moved in onebit["moved"])
    for moved in ternary["moved"]:
        assert moved.view(-1)[torch.arange(moved.numel()) % STILL != 0].all()


# ---------------------------------------------------------------- the wire


def bytes_of_a_step(rank: int, transport: Transport, name: str, ternary: bool, options: dict) -> tuple[dict, str]:
    param = Parameter(torch.ones(1024, 200))
    options = UNGUARDED | options | {"process_group": transport}
    optimizer = construct(name, [param], freeze_step=1, ternary=ternary, **options)
    for step in range(2):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.step()
    assert optimizer.phase == "compression"
    return optimizer.stats(), repr(optimizer)


@pytest.mark.long(but=2)
@ADAM_AND_LAMB
@pytest.mark.parametrize("options", [{}, {"scale_scope": "global"}], ids=["defaults", "global"])
def test_a_step_sends_two_bits_per_parameter(name, options):
    (one, said), (two, says) = (simulate(bytes_of_a_step, 2, name, ternary, options)[0] for ternary in (False, True))
    ratio = two["bytes_step"] / one["bytes_step"]
    bits = 8 * two["bytes_step"] / two["parameters"]
    print(f"{name}, {options}: {ratio:.4f} times the bytes of one bit, {bits:.4f} bits sent per parameter")
    assert two["bytes_step"] - one["bytes_step"] == two["parameters"] // 8, "only the bits travel twice"
    if options:
        assert 1.99 < ratio < 2.01
    assert two["wire_bytes"] > one["wire_bytes"]
    momenta = 2 if name == "onebit-lamb" else 1
    assert two["state_bytes"] - one["state_bytes"] == momenta * two["parameters"] // 8
    assert ", ternary" in says
    assert "ternary" not in said


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_from_before_this_option_has_one_bit():
    params = [Parameter(torch.ones(300))]
    optimizer = construct("onebit-adam", params, freeze_step=1)
    for _ in range(2):
        params[0].grad = torch.ones(300)
        optimizer.step()
    saved = optimizer.state_dict()
    assert header_of(saved)["settled"]["ternary"] is False
    change_header(saved, lambda header: header["settled"].pop("ternary"))
    construct("onebit-adam", params, freeze_step=1).load_state_dict(saved)
    with pytest.raises(ValueError, match="written with ternary=False, but here it is True; it can only be changed"):
        construct("onebit-adam", params, freeze_step=1, ternary=True).load_state_dict(saved)
