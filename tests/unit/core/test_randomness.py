"""Counter-based draws: pure, uniform, independent of what is drawn beside them."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.randomness import fresh_seed, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNTER = st.integers(0, 2**32 - 1)
FIRST_DRAWS = [0.903444, 0.084314, 0.716737]


@given(seed=INT64, choice=COUNTER, position=COUNTER)
def test_a_draw_is_a_pure_function_in_the_unit_interval(seed: int, choice: int, position: int) -> None:
    """The same counters give the same number, always in [0, 1)."""
    draw = uniform(seed, choice, position)
    assert draw == uniform(seed, choice, position)
    assert 0.0 <= draw < 1.0


def test_the_first_draws_are_fixed_for_ever() -> None:
    """A failover between two versions must go on with the same draws."""
    assert [round(uniform(1, 0, i), 6) for i in range(3)] == FIRST_DRAWS


def test_draws_are_uniform_and_each_counter_matters() -> None:
    """Mean and spread of many draws; neighbouring counters are unrelated."""
    draws = [uniform(7, choice, position) for choice in range(10) for position in range(1000)]
    assert abs(statistics.mean(draws) - 0.5) < 0.01
    assert abs(statistics.pstdev(draws) - 12**-0.5) < 0.01
    assert len(set(draws)) == len(draws)


def test_a_fresh_seed_survives_javascript() -> None:
    """Seeds we make up are exact as a double."""
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(int(float(seed)) == seed for seed in seeds)
