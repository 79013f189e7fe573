"""When the store is measured off the request path."""

from __future__ import annotations

from antiphon.kv.breaker import Breaker, BreakerSettings
from antiphon.kv.probing import ProbePlan
from antiphon.kv.store import FaultKind


def plan() -> ProbePlan:
    return ProbePlan.starting(Breaker(BreakerSettings(), lambda: 0.0), 0.0)


def measured(made: ProbePlan, now: float) -> ProbePlan:
    """A probe was made at this time."""
    assert made.begin(now)
    made.end(now)
    return made


def test_the_first_probe_is_due_at_once() -> None:
    """The round trip should be known before the first request asks."""
    assert plan().due_s == 0.0


def test_a_store_in_use_is_left_alone() -> None:
    """Requests measure it themselves."""
    assert measured(plan(), 0.0).due_s is None


def test_a_refusal_makes_it_due_now_and_again() -> None:
    """At once where nothing was measured lately, then with a pause."""
    made = measured(plan(), 0.0)
    made.refuse(5.0)
    assert measured(made, 5.0).due_s == 5.25
    assert not made.begin(5.2)
    assert measured(made, 5.25).due_s == 5.5


def test_refusals_do_not_hurry_it() -> None:
    """A thousand refused requests are one reason to measure."""
    made = measured(plan(), 0.0)
    made.refuse(5.0)
    measured(made, 5.0)
    made.refuse(5.01)
    assert made.due_s == 5.25


def test_it_ends_when_nobody_asks() -> None:
    """Ten seconds after the last refusal."""
    made = measured(plan(), 0.0)
    made.refuse(5.0)
    now = 5.0
    while (due_s := made.due_s) is not None:
        now = due_s
        measured(made, now)
    assert 14.5 < now <= 15.0


def test_one_at_a_time() -> None:
    """A probe that hangs is the only one."""
    made = plan()
    assert made.begin(0.0)
    made.refuse(1.0)
    assert made.due_s is None
    assert not made.begin(100.0)


def test_an_open_breaker_decides_when() -> None:
    """Its one attempt is the probe, refused requests or not."""
    made = measured(plan(), 0.0)
    for _ in range(3):
        made.breaker.fail(1.0, FaultKind.TIMEOUT)
    assert made.due_s == 1.25
    assert not made.begin(1.2)
    assert made.begin(1.25)
    made.breaker.fail(1.5, FaultKind.TIMEOUT)
    made.end(1.5)
    assert made.due_s == 1.75
