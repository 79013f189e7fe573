"""How much may be tried twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.clock import VirtualClock
from antiphon.router.budget import MOST, RESERVE, SHARE, TRICKLE_PER_S, RetryBudget


def test_a_quiet_gateway_may_mend_a_few_faults() -> None:
    """There is a small reserve, and it comes back with time, up to a bound."""
    clock = VirtualClock()
    budget = RetryBudget(clock)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    clock.advance(1 / TRICKLE_PER_S)
    assert [budget.take() for _ in range(2)] == [True, False]
    clock.advance(1e9)
    assert [budget.take() for _ in range(int(MOST) + 1)] == [True] * int(MOST) + [False]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=400))
def test_retries_stay_below_their_share(history: list[tuple[bool, float]]) -> None:
    """Whatever comes in whatever order: reserve, share of the requests and trickle are never exceeded."""
    clock = VirtualClock()
    budget = RetryBudget(clock)
    num_requests = num_retries = 0
    for is_request, pause_s in history:
        clock.advance(pause_s)
        if is_request:
            budget.note_request()
            num_requests += 1
        else:
            num_retries += budget.take()
        assert num_retries <= RESERVE + SHARE * num_requests + TRICKLE_PER_S * clock.now() + 1e-6
