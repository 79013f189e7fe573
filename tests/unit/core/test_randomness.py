"""Counter-based draws: pure, uniform, independent of what is drawn beside them."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.randomness import draw_key, fresh_seed

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNTER = st.integers(0, 2**32 - 1)
FIRST_KEYS = [16665596219191873652, 1555318910278515545, 13221459152180396552]


@given(seed=INT64, choice=COUNTER, position=COUNTER)
def test_a_key_is_a_pure_function_of_the_counters(seed: int, choice: int, position: int) -> None:
    """The same counters give the same 64 bits."""
    key = draw_key(seed, choice, position)
    assert key == draw_key(seed, choice, position)
    assert 0 <= key < 2**64


def test_the_first_keys_are_fixed_for_ever() -> None:
    """A failover between two versions must go on with the same draws."""
    assert [draw_key(1, 0, i) for i in range(3)] == FIRST_KEYS


def test_keys_are_uniform_and_each_counter_matters() -> None:
    """Mean and spread of many keys; neighbouring counters are unrelated."""
    draws = [draw_key(7, choice, position) / 2**64 for choice in range(10) for position in range(1000)]
    assert abs(statistics.mean(draws) - 0.5) < 0.01
    assert abs(statistics.pstdev(draws) - 12**-0.5) < 0.01
    assert len(set(draws)) == len(draws)


def test_a_fresh_seed_survives_javascript() -> None:
    """Seeds we make up are exact as a double."""
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(int(float(seed)) == seed for seed in seeds)
