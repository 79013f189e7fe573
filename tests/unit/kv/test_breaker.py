"""The breaker: opens soon, lets one attempt out at a time, rests a store that refuses."""

from __future__ import annotations

import pytest

from antiphon.kv.breaker import REFUSALS, Breaker, BreakerSettings, BreakerState
from antiphon.kv.store import FaultKind

SETTINGS = BreakerSettings(max_failures=3, max_failing_s=1.0, min_retry_s=0.25, max_retry_s=4.0)
CALM = FaultKind.TIMEOUT


def breaker(random: float = 0.0) -> Breaker:
    return Breaker(SETTINGS, lambda: random)


def opened(kind: FaultKind = CALM, random: float = 0.0) -> Breaker:
    """One that opened at 0 s."""
    made = breaker(random)
    for _ in range(3):
        made.fail(0.0, kind)
    assert made.state is BreakerState.OPEN
    return made


def test_it_opens_after_failures_in_a_row() -> None:
    """Two failures are weather, the third opens it."""
    made = breaker()
    made.fail(0.0, CALM)
    made.fail(0.1, CALM)
    assert made.is_closed
    made.fail(0.2, CALM)
    assert made.state is BreakerState.OPEN
    assert made.num_opened == 1


def test_a_success_between_keeps_it_closed() -> None:
    """Failures count only in a row."""
    made = breaker()
    for _ in range(5):
        made.fail(0.0, CALM)
        made.fail(0.0, CALM)
        made.succeed()
    assert made.is_closed


def test_it_opens_after_a_while_of_failing() -> None:
    """Few calls must not keep a dead store in use: failing for a second is enough."""
    made = breaker()
    made.fail(0.0, CALM)
    made.fail(1.0, CALM)
    assert made.state is BreakerState.OPEN


@pytest.mark.parametrize("kind", sorted(REFUSALS))
def test_a_refusal_opens_at_once(kind: FaultKind) -> None:
    """The store works and says no: the next call would hear the same."""
    made = breaker()
    made.fail(0.0, kind)
    assert made.state is BreakerState.OPEN


def test_open_lets_nothing_out_until_its_time() -> None:
    """Never two attempts within the least pause."""
    made = opened()
    assert made.next_try_s == 0.25
    assert not made.may_try(0.249)
    assert made.may_try(0.25)


def test_one_attempt_at_a_time() -> None:
    """While it is under way nothing else goes out, however long it takes."""
    made = opened()
    assert made.may_try(1.0)
    assert made.state is BreakerState.HALF_OPEN
    assert not made.may_try(1.0)
    assert not made.may_try(100.0)


def test_the_attempt_decides() -> None:
    """Success closes it, one failure opens it again."""
    made = opened()
    assert made.may_try(1.0)
    made.fail(1.5, CALM)
    assert made.state is BreakerState.OPEN
    assert made.next_try_s == 1.75
    assert made.may_try(1.75)
    made.succeed()
    assert made.is_closed
    assert made.num_opened == 1


def test_retries_are_spread() -> None:
    """Workers that lost one store do not come back together; the pause never gets shorter for it."""
    assert opened(random=0.999).next_try_s == pytest.approx(0.49975)


def test_a_dead_store_is_asked_steadily() -> None:
    """The pause does not grow: it must be noticed within 2 s that the store is back."""
    made = opened()
    now = 0.0
    for _ in range(20):
        assert made.next_try_s is not None
        now = made.next_try_s
        assert made.may_try(now)
        made.fail(now, FaultKind.UNREACHABLE)
    assert made.next_try_s == pytest.approx(now + 0.25)


def test_a_refusing_store_is_left_alone_for_longer() -> None:
    """The pause doubles up to its bound, and starts small again after a success."""
    made = opened(FaultKind.OUT_OF_MEMORY)
    pauses, now = [], 0.0
    for _ in range(6):
        assert made.next_try_s is not None
        pauses.append(made.next_try_s - now)
        now = made.next_try_s
        assert made.may_try(now)
        made.fail(now, FaultKind.OUT_OF_MEMORY)
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 4.0])
    made.succeed()
    made.fail(now, FaultKind.OUT_OF_MEMORY)
    assert made.next_try_s == pytest.approx(now + 0.25)


def test_late_failures_do_not_put_the_retry_off() -> None:
    """Calls that began before it opened may fail after it: that is no news."""
    made = opened()
    made.fail(0.2, CALM)
    assert made.next_try_s == 0.25


def test_late_success_closes_it() -> None:
    """An answer is an answer, whenever it was asked for."""
    made = opened()
    made.succeed()
    assert made.is_closed
    assert made.next_try_s is None


@pytest.mark.parametrize("wrong", [{"max_failures": 0}, {"min_retry_s": 0.0}, {"max_retry_s": 0.1}])
def test_a_breaker_without_pause_is_refused(wrong: dict[str, float]) -> None:
    """It would hammer a store that is down."""
    with pytest.raises(ValueError, match="breaker"):
        BreakerSettings(**wrong)
