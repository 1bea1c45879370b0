"""What is found out once and used again: launches as they were bound, and where users' tensors lie."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from backends import bits_of
from op_arguments import Problem
from torch.utils._python_dispatch import TorchDispatchMode

from fusedonebit import OneBitAdam, triton_kernels
from fusedonebit.triton_kernels import using
from fusedonebit.triton_kernels.op import OPS, Op, launches
from fusedonebit.triton_kernels.tables import Facts, Listed, Pattern, tables_of

needs_compiler = pytest.mark.needs_compiler


def optimizer_of(*shapes: tuple[int, ...]) -> tuple[OneBitAdam, list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    return OneBitAdam(params, 1e-2, freeze_step=2), params


def give(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.fixture
def bound(monkeypatch):
    """The names of ops that were bound."""
    names: list[str] = []
    bind = Op.bind

    def noted(self, arguments):
        names.append(self.name)
        return bind(self, arguments)

    monkeypatch.setattr(Op, "bind", noted)
    return names


# ---------------------------------------------------------------- launches


@needs_compiler
def test_a_step_like_the_last_binds_nothing_and_launches_as_much(bound):
    optimizer, params = optimizer_of((5, 7), (3,), (2000,))
    give(params, 0)
    counts = []
    for _ in range(8):
        optimizer.step()
        before = launches.total()
        bound.clear()
        optimizer.step()
        counts.append(launches.total() - before)
    assert optimizer.phase == "compression"
    assert bound == []
    assert counts[-1] == counts[-2] >= 3


@needs_compiler
@pytest.mark.parametrize("name", ["momentum_compress", "apply_momentum"])
def test_the_same_addresses_with_other_shapes_are_bound_anew(name, bound):
    p = Problem((3000, 70), 1, 128)
    kept = tables_of(p.layout, torch.device("cpu"))
    given = p.arguments(name)
    op = getattr(triton_kernels, name)
    op(*given)
    op(*given)
    assert bound == [name]
    assert kept.made()
    # A longer view of the same memory, and less of the same: both begin where it did.
    scale = given.exp_avg.scale
    shorter = scale.as_strided(scale.shape, scale.stride())[: len(scale) // 2]
    with pytest.raises(ValueError, match=r"exp_avg.scale must be float32 \[B\]"):
        op(*given._replace(exp_avg=given.exp_avg._replace(scale=shorter)))


@needs_compiler
def test_what_is_copied_for_a_launch_is_copied_each_time(bound):
    wide = torch.zeros(2048)
    for value in (1.0, -1.0, 1.0):
        wide.fill_(value)
        bits = torch.zeros(128, dtype=torch.uint8)
        triton_kernels.op.OPS["pack"].run(wide[::2], bits)
        assert set(bits.tolist()) == {255 if value > 0 else 0}


@needs_compiler
def test_an_optimizer_in_memory_of_one_that_is_gone_is_as_eager():
    def run() -> list[torch.Tensor]:
        optimizer, params = optimizer_of((40, 3), (9,), (1500,))
        for seed in range(5):
            give(params, seed)
            optimizer.step()
        return [p.detach().clone() for p in params]

    with using("plain"):
        expected = run()
    for _ in range(4):
        for was, now in zip(expected, run(), strict=True):
            assert torch.equal(bits_of(was), bits_of(now))
        gc.collect()


def test_dispatch_modes_and_profilers_see_every_op():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    p = Problem((300, 7), 1, 128)
    names: set[str] = set()
    with Names():
        triton_kernels.momentum_compress(*p.arguments("momentum_compress"))
    assert "fusedonebit::momentum_compress" in names
    with torch.profiler.profile() as profile:
        triton_kernels.momentum_compress(*p.arguments("momentum_compress"))
    assert "fusedonebit::momentum_compress" in {event.key for event in profile.key_averages()}


def test_arguments_but_plain_tensors_go_through_the_dispatcher():
    class Own(torch.Tensor):
        pass

    p = Problem((300, 7), 1, 128)
    arguments = list(p.arguments("momentum_compress").flat)
    op = OPS["momentum_compress"]
    assert op.is_direct(arguments)
    first = next(i for i, x in enumerate(arguments) if isinstance(x, list))
    assert not op.is_direct(
        [*arguments[:first], [x.as_subclass(Own) for x in arguments[first]], *arguments[first + 1 :]]
    )
    assert not op.is_direct([x.as_subclass(Own) if isinstance(x, torch.Tensor) else x for x in arguments])
    assert not op.is_direct(arguments[:-4])  # three have a default


# ---------------------------------------------------------------- users' tensors


def test_a_pattern_tells_layouts_apart_and_keeps_no_tensor():
    pattern = Pattern()
    x = torch.zeros(4, 4)
    assert not pattern.fits([x])
    pattern.take([x])
    assert pattern.fits([torch.ones(4, 4)])
    for other in (x.t(), x[:2], x.double(), x.to("meta"), x.to_sparse()):
        assert not pattern.fits([other]) or other.stride() == x.stride() != (1, 4)
    nothing = torch.empty(0)
    assert pattern.fits([nothing, x, nothing], nothing)
    assert not any(map(pattern.fits, ([x, torch.ones(4, 4)], [x, nothing], [nothing])))
    gone = weakref.ref(x)
    del x, other
    gc.collect()
    assert gone() is None


def test_facts_are_taken_anew_where_an_address_has_changed():
    made = [torch.zeros(3), torch.zeros(0), torch.zeros(2, dtype=torch.bfloat16)]
    facts = Facts(made)
    assert (facts.numels, facts.addresses[1], facts.kinds) == ((3, 0, 2), 0, (0, 0, 1))
    assert Listed.of(made, facts).facts is facts
    other = [*made[:2], torch.zeros(2, dtype=torch.bfloat16)]
    assert Listed.of(other, facts).facts.addresses == (*facts.addresses[:2], other[2].data_ptr())
    assert Listed.of(other, facts).facts.key == Facts(other).key


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_a_gradient_turned_in_place_is_taken_in_its_new_order():
    optimizer, params = optimizer_of((8, 8))
    twin, twins = copy.deepcopy((optimizer, params))
    for seed in range(6):
        give(params, seed)
        give(twins, seed)
        optimizer.step()
        twin.step()
    assert torch.equal(params[0], twins[0])
    params[0].grad.data = params[0].grad.data.t()  # the same tensor at the same address
    twins[0].grad = twins[0].grad.t().contiguous()
    optimizer.step()
    twin.step()
    assert torch.equal(params[0], twins[0])


def test_gradients_are_freed_when_they_are_dropped():
    optimizer, params = optimizer_of((300,), (5,))
    for seed in range(4):
        give(params, seed)
        optimizer.step()
    gone = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    assert [g() for g in gone] == [None, None]


@pytest.mark.filterwarnings("ignore::fusedonebit.FusedOneBitWarning")
def test_gradients_that_come_and_go_give_the_bits_of_eager():
    def run() -> list[torch.Tensor]:
        optimizer, params = optimizer_of((5,), (5,), (5,), (7, 2))
        for step in range(9):
            give(params, step)
            for absent in range(step % 3):
                params[(step + absent) % 3].grad = None
            optimizer.step()
        return [p.detach().clone() for p in params]

    with using("plain"):
        expected = run()
    assert all(torch.equal(bits_of(was), bits_of(now)) for was, now in zip(expected, run(), strict=True))
