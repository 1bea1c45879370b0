"""Whatever happens in whatever order: ranks stay bit-identical, a resumed run is the same, a skip changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequences import OPTIMIZERS, check, on_gloo, sequences, simulated

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@settings(max_examples=10, suppress_health_check=SLOW)
@given(st.sampled_from(sorted(OPTIMIZERS)), sequences(2))
def test_ten_random_sequences_on_simulated_ranks(name, sequence):
    check(simulated(2, name, sequence))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_random_sequences_on_gloo_ranks(name, world_size):
    """17 for each of nine optimizers on 2 and on 3 ranks, 306 in all."""

    held = 0

    @settings(max_examples=17, suppress_health_check=SLOW)
    @given(sequences(world_size))
    def run(sequence: list[tuple]) -> None:
        nonlocal held
        check(on_gloo(world_size, name, sequence))
        held += 1

    run()
    print(f"{name} on {world_size} ranks: {held} random sequences held")


@pytest.mark.parametrize("name", ["zero-one-adam", "onebit-lion, mean"])
def test_a_group_added_after_a_resume_is_laid_out_as_without_one(name):
    """A few elements more, and blocks of another size would suit three ranks better."""
    check(simulated(3, name, [("resume", True), ("group", 72), *[("step", seed, ()) for seed in range(4)]]))
