"""An optimizer of a rule, declared state and a step gets the rest from the frame: here is one, and what it gets."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import assert_equal_backends, compared
from hypothesis import HealthCheck, example, given, settings
from op_draws import draws
from ranks import run_ranks, simulate
from sequences import OPTIMIZERS, check, sequences, simulated
from torch.nn import Linear, Parameter, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

from fusedonebit import dcp, ddp
from fusedonebit.comm import SignVote
from fusedonebit.core.algorithm import Algorithm
from fusedonebit.core.exchange import VoteExchange
from fusedonebit.core.frame import Frame
from fusedonebit.core.optimizer import DistributedOptimizer
from fusedonebit.core.stage import Stage
from fusedonebit.core.state_tensor import StateTensor
from fusedonebit.core.traits import Traits
from fusedonebit.triton_kernels import rule, rules, using, vote_op
from fusedonebit.triton_kernels.jit import tl

ROOT = Path(__file__).parent.parent
SIZES = ((40, 20), (20,), (7, 3, 2))
LR, BETA, DECAY = 1e-2, 0.9, 0.1


@rule
def heavy_ball(m, g, k):
    """Vote on the momentum's sign (Bernstein et al., 2019, Algorithm 3)."""
    m = rules.momentum(m, g, k)
    return m, m


toy_vote = vote_op("toy_vote", heavy_ball)


class MajorityVote(Algorithm, Stage):
    """Workers vote on the sign of their momentum."""

    traits = Traits(phases={"one-bit": True}, shards=False)

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.exp_avg = torch.zeros(frame.layout.numel, device=frame.device)
        self.exchange = VoteExchange(frame, "majority", self.exp_avg)
        self.parts = (self.exchange,)

    def state(self, compressed: bool) -> tuple[StateTensor]:
        return (StateTensor("exp_avg", "element", self.exp_avg, of_rank=True),)

    def step(self, grads: Any, coef: torch.Tensor, abort: bool) -> torch.Tensor:
        frame, exchange, agreed = self.frame, self.exchange, self.agree(grads, coef)

        def vote(part: SignVote) -> None:
            hold = part.verdict.hold + 1 if abort else part.verdict.hold
            where = (frame.steps.updates, hold, part.to_servers.bits, part.weights, frame.ranks.transport.rank)
            toy_vote(grads, frame.places, self.exp_avg, agreed.coef, *where, part.verdict.found)

        exchange.apply(exchange.synchronise(vote, exchange.context(abort, agreed.hold), coef))
        return exchange.restore_absent()


class Signum(DistributedOptimizer):
    """SignSGD with momentum by majority vote."""

    kind = MajorityVote

    def __init__(self, params: Any, lr: float = LR, *, process_group: Any = None) -> None:
        defaults = {"lr": lr, "betas": (BETA, 0.99), "weight_decay": DECAY}
        super().__init__(params, defaults, process_group=process_group)


# ---------------------------------------------------------------- what it is


def parameters() -> list[Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(size, generator=draw)) for size in SIZES]


def gradients(rank: int, step: int) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=draw) for size in SIZES]


def joined(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def momenta(optimizer: Signum) -> torch.Tensor:
    return joined(optimizer.momentum(p) for p in optimizer.param_groups[0]["params"])


Trained = tuple[torch.Tensor, torch.Tensor]


def train(optimizer: Signum, rank: int, steps: range, change: Callable[..., None] = lambda *_: None) -> Trained:
    params = optimizer.param_groups[0]["params"]
    for step in steps:
        grads = gradients(rank, step)
        change(rank, step, grads)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
    return joined(params).clone(), momenta(optimizer)


def on_ranks(world_size: int, steps: int = 6, change: Callable[..., None] = lambda *_: None) -> list[Trained]:
    def run(rank: int, transport: Any) -> Trained:
        return train(Signum(parameters(), process_group=transport), rank, range(steps), change)

    return simulate(run, world_size)


def test_one_worker_is_its_formula_and_all_ranks_are_identical():
    x = joined(parameters()).clone()
    m = torch.zeros_like(x)
    for step in range(6):
        m = m * BETA + joined(gradients(0, step)) * (1 - BETA)
        x = x * (1 - LR * DECAY) - m.sign() * LR
    ((found, momentum),) = on_ranks(1)
    assert torch.equal(found, x)
    assert torch.equal(momentum, m)
    several = on_ranks(3)
    assert all(torch.equal(found, several[0][0]) for found, _ in several)
    assert not torch.equal(several[0][0], x)
    assert not torch.equal(several[0][1], several[1][1]), "momenta are each worker's own"


class Undecayed(Signum):
    """Its groups have no weight_decay."""

    def __init__(self, params: Any) -> None:
        DistributedOptimizer.__init__(self, params, {"lr": LR, "betas": (BETA, 0.99)}, process_group=None)


def test_groups_without_weight_decay_do_not_decay():
    with_none = Signum(parameters())
    with_none.param_groups[0]["weight_decay"] = 0.0
    without = Undecayed(parameters())
    assert all(map(torch.equal, train(without, 0, range(3)), train(with_none, 0, range(3))))


# ---------------------------------------------------------------- what it gets


@rule
def moved(m, g, k):
    """Has the name of one of ``rules``, calls others with constants, and has branches."""
    c = tl.where(g > 0, rules.preconditioned(m, g * g, k, False), -1.5 * m)
    return rules.residual(c, g, True), c


toy_branches = vote_op("toy_branches", moved)


@pytest.mark.kernels
@pytest.mark.parametrize("op", ["toy_vote", "toy_branches"])
def test_all_backends_have_the_same_bits(op):
    for draw in draws(op, 0, 16):
        assert_equal_backends(op, draw.make)


@pytest.mark.kernels
def test_a_run_has_the_same_bits_on_all_backends():
    with using("plain"):
        expected = on_ranks(2, 2)
    for backend in compared([expected[0][0]]):
        with using(backend):
            found = on_ranks(2, 2)
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs)), backend


def test_the_op_is_registered_cleanly():
    (draw,) = draws("toy_vote", 0, 1)
    torch.library.opcheck(torch.ops.fusedonebit.toy_vote.default, draw.make().flat)


def test_a_rule_with_what_other_backends_lack_is_refused():
    def exponential(m, g, k):
        return tl.exp(m), g

    with pytest.raises(NotImplementedError, match=r"cannot be printed in C: tl.exp\(m\)"):
        vote_op("toy_exp", rule(exponential))

    def own_constant(m, g, k):
        return m + LR, g

    with pytest.raises(TypeError, match=r"rule own_constant must be made of .* got \['LR'\]"):
        vote_op("toy_constant", rule(own_constant))

    def of_another_shape(m, g):
        return m + g

    with pytest.raises(TypeError, match=r"rule of_another_shape must take m, g and k, and return two values"):
        vote_op("toy_sum", rule(of_another_shape))
    assert not hasattr(torch.ops.fusedonebit, "toy_exp")


def test_a_gradient_all_lack_moves_nothing_some_lack_is_zeros():
    def lack(rank: int, step: int, grads: list) -> None:
        grads[0] = None
        if rank == 1:
            grads[1] = None

    def zeros(rank: int, step: int, grads: list) -> None:
        grads[0] = None
        if rank == 1:
            grads[1] = torch.zeros(SIZES[1])

    first = parameters()[0].detach().flatten()
    for (found, momentum), (expected, _) in zip(on_ranks(2, 4, lack), on_ranks(2, 4, zeros), strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(found[: len(first)], first)
        assert not momentum[: len(first)].any()
        assert momentum[len(first) :].any()


EACH_EVENT: list[tuple] = [("step", 1, ()), ("resume", False), ("step", 5, ((1, 0, "nan"),))]
EACH_EVENT += [("step", 6, ((0, 1, "none"), (1, 0, "none"))), ("resume", True), ("step", 3, ())]


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(sequence=sequences(2, 12))
@example(sequence=EACH_EVENT)
def test_random_sequences_break_no_promise(sequence):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, "toy", partial(Signum, lr=1e-3))
        check(simulated(2, "toy", sequence))


# ---------------------------------------------------------------- on real ranks


def with_ddp(rank: int, world_size: int, wrapped: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Sequential(Linear(6, 16), Tanh(), Linear(16, 3))
    optimizer = Signum(model.parameters())
    call: Any = model
    if wrapped:
        call = DistributedDataParallel(model)
        ddp.attach(call, optimizer)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(5):
        call(torch.randn(8, 6, generator=draw)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return joined(model.parameters())


def test_ddp_changes_nothing():
    plain, attached = run_ranks(with_ddp, 2, False), run_ranks(with_ddp, 2, True)
    assert torch.equal(plain[0], plain[1])
    assert all(map(torch.equal, plain, attached))


def save(rank: int, world_size: int, folder: str) -> Trained:
    model = torch.nn.ParameterList(parameters())
    optimizer = Signum(model.parameters())
    trained = train(optimizer, rank, range(5))
    dcp.save(model, optimizer, folder)
    return trained


def load(rank: int, world_size: int, folder: str) -> Trained:
    model = torch.nn.ParameterList(parameters())
    optimizer = Signum(model.parameters(), 0.5)
    dcp.load(model, optimizer, folder)
    return joined(model), momenta(optimizer)


def test_other_numbers_of_ranks_load_the_mean_of_the_momenta(tmp_path):
    wrote = run_ranks(save, 2, str(tmp_path / "saved"))
    mean = (wrote[0][1] + wrote[1][1]) / 2
    for ranks in (1, 3):
        for weights, momentum in run_ranks(load, ranks, str(tmp_path / "saved")):
            assert torch.equal(weights, wrote[0][0])
            torch.testing.assert_close(momentum, mean, rtol=0.0, atol=1e-7)


# ---------------------------------------------------------------- how much a real one is


def test_lion_is_120_lines_in_four_files(capsys):
    """What the package alone would lose with Lion: its class, its rule, and its names in two lists."""
    files = [f for folder in ("fusedonebit", "comm", "triton_kernels") for f in (ROOT / folder).glob("**/*.py")]
    files = [f for f in files if "apps" not in f.parts and not f.parent.is_symlink()]

    def names(file: Path) -> set[str]:
        """Those in code; not in strings and comments."""
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}

    touched = {str(f.relative_to(ROOT)) for f in files if any("lion" in name.lower() for name in names(f))}
    own = (ROOT / "fusedonebit/optim/lion.py").read_text().count("\n")
    rule = inspect.getsource(rules.lion.function).count("\n")
    with capsys.disabled():
        print(f"Lion: {own} lines, and {rule} of its rule; in {', '.join(sorted(touched))}")
    assert touched == {
        "fusedonebit/__init__.py",
        "fusedonebit/optim/lion.py",
        "triton_kernels/__init__.py",
        "triton_kernels/rules.py",
    }
    assert own + rule <= 120


def test_a_momentum_of_another_name_says_what_to_declare():
    class Renamed(MajorityVote):
        def state(self, compressed: bool) -> tuple[StateTensor]:
            return (StateTensor("buffer", "element", self.exp_avg, of_rank=True),)

    optimizer = type("Kind", (Signum,), {"kind": Renamed})(parameters())
    with pytest.raises(NotImplementedError, match="Renamed keeps no 'exp_avg': return it from state"):
        train(optimizer, 0, range(1))
