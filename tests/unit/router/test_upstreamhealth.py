"""When an upstream is put aside, and what brings it back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.upstreamhealth import MAX_ASIDE_S, MAX_FAILURES, MIN_ASIDE_S, UpstreamHealth


def failing(num_failures: int, now_s: float = 0.0) -> UpstreamHealth:
    health = UpstreamHealth(lambda: 0.0)
    for _ in range(num_failures):
        assert health.may_try(now_s)
        health.fail(now_s)
    return health


def test_failures_in_a_row_put_it_aside() -> None:
    """One less does not; a success in between begins the count anew."""
    assert not failing(MAX_FAILURES - 1).is_aside
    health = failing(MAX_FAILURES - 1)
    health.succeed()
    health.fail(0.0)
    assert not health.is_aside
    assert failing(MAX_FAILURES).is_aside


def test_one_request_tries_it_when_its_time_has_come() -> None:
    """The others wait for what becomes of that one."""
    health = failing(MAX_FAILURES)
    assert not health.may_try(MIN_ASIDE_S - 0.01)
    assert health.retry_after_s(0.25) == MIN_ASIDE_S - 0.25
    assert health.may_try(MIN_ASIDE_S)
    assert not health.may_try(MIN_ASIDE_S)
    health.succeed()
    assert health.may_try(MIN_ASIDE_S) and health.may_try(MIN_ASIDE_S)


def test_a_probe_that_fails_doubles_the_while() -> None:
    """Up to a bound."""
    health, now_s, whiles = failing(MAX_FAILURES), 0.0, []
    for _ in range(8):
        whiles.append(health.retry_after_s(now_s))
        now_s += whiles[-1]
        assert health.may_try(now_s)
        health.fail(now_s)
    assert whiles[:3] == [MIN_ASIDE_S, 2 * MIN_ASIDE_S, 4 * MIN_ASIDE_S]
    assert whiles[-1] == MAX_ASIDE_S


def test_a_probe_that_was_given_up_lets_the_next_one_try() -> None:
    """A client that left, or a server that is busy, says nothing of its health."""
    health = failing(MAX_FAILURES)
    assert health.may_try(MIN_ASIDE_S)
    health.excuse()
    assert health.is_aside and health.may_try(MIN_ASIDE_S)


def test_requests_that_began_before_do_not_lengthen_the_while() -> None:
    """A batch that fails together is one fault."""
    health = failing(MAX_FAILURES)
    for _ in range(20):
        health.fail(0.5)
    assert health.retry_after_s(0.0) == MIN_ASIDE_S


@given(st.lists(st.sampled_from(["try", "ok", "fail", "excuse", "wait"]), max_size=60))
def test_it_always_comes_back(events: list[str]) -> None:
    """Whatever happened: after the longest while somebody may try, and a success opens it."""
    health, now_s = UpstreamHealth(lambda: 0.99), 0.0
    for event in events:
        match event:
            case "try":
                health.may_try(now_s)
            case "ok":
                health.succeed()
            case "fail":
                health.fail(now_s)
            case "excuse":
                health.excuse()
            case "wait":
                now_s += 1.0
    health.excuse()  # no request is open any more
    assert health.may_try(now_s + 1.2 * MAX_ASIDE_S)
    health.succeed()
    assert not health.is_aside
