"""Which replicas get nothing because their answers fail, and how they come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.clock import VirtualClock
from antiphon.router.ejection import EJECT_S, FAILURES, MOST_S, PROBE_S, Ejections


def ejected(ejections: Ejections, replica: str = "a", num_completed: int = 0) -> None:
    """Fail until it is ejected."""
    for _ in range(FAILURES):
        is_now = ejections.note_failure(replica, num_completed)
    assert is_now


def test_five_failures_in_a_row_eject() -> None:
    """An answer that completes in between starts the count anew."""
    ejections = Ejections(VirtualClock())
    assert not any(ejections.note_failure("a", 0) for _ in range(FAILURES - 1))
    assert not any(ejections.note_failure("a", 1) for _ in range(FAILURES - 1))
    assert not ejections.is_ejected("a", 1)
    assert ejections.note_failure("a", 1)
    assert ejections.is_ejected("a", 1)
    assert not ejections.is_ejected("b", 0)


def test_it_comes_back_by_one_probe() -> None:
    """When its time is over one request goes there; the others wait for how that ends."""
    clock = VirtualClock()
    ejections = Ejections(clock)
    ejected(ejections)
    clock.advance(EJECT_S - 1)
    assert ejections.is_ejected("a", 0)
    clock.advance(1)
    assert not ejections.is_ejected("a", 0)
    ejections.note_sent("a")
    assert ejections.is_ejected("a", 0)
    assert not ejections.is_ejected("a", 1)
    assert not ejections.note_failure("a", 1)


def test_a_failed_probe_costs_more_time() -> None:
    """Each ejection is longer than the one before, up to a bound."""
    clock = VirtualClock()
    ejections = Ejections(clock)
    ejected(ejections)
    for number in range(2, 20):
        clock.advance(MOST_S)
        ejections.note_sent("a")
        assert ejections.note_failure("a", 0)
        clock.advance(min(MOST_S, EJECT_S * number) - 1)
        assert ejections.is_ejected("a", 0)
        clock.advance(1)
        assert not ejections.is_ejected("a", 0)


def test_a_probe_that_never_ends_is_not_the_last() -> None:
    """Its client may have left: after a while another request is let through."""
    clock = VirtualClock()
    ejections = Ejections(clock)
    ejected(ejections)
    clock.advance(EJECT_S)
    ejections.note_sent("a")
    clock.advance(PROBE_S)
    assert not ejections.is_ejected("a", 0)


def test_what_was_open_may_complete_meanwhile() -> None:
    """An old answer's good end is no probe: the time is served."""
    ejections = Ejections(VirtualClock())
    ejected(ejections)
    assert ejections.is_ejected("a", 1)


@given(st.integers(1, 8), st.sets(st.integers(0, 7)))
def test_never_more_than_half(num_replicas: int, bad: set[int]) -> None:
    """Where most are bad it is not they: nobody is barred, so never the last one."""
    ejections = Ejections(VirtualClock())
    replicas = [(f"r{number}", 0) for number in range(num_replicas)]
    bad = {number for number in bad if number < num_replicas}
    for number in bad:
        ejected(ejections, f"r{number}")
    barred = ejections.barred(replicas)
    assert barred == (set() if 2 * len(bad) > num_replicas else {f"r{number}" for number in bad})


def test_a_slow_one_is_ejected_though_it_completes() -> None:
    """After five looks in a row; one that finds it well starts anew; each ejection is longer."""
    clock = VirtualClock()
    ejections = Ejections(clock)
    assert not any(ejections.note_pace("a", is_slow=True) for _ in range(FAILURES - 1))
    assert not ejections.note_pace("a", is_slow=False)
    assert [ejections.note_pace("a", is_slow=True) for _ in range(FAILURES)] == [False] * 4 + [True]
    assert ejections.is_ejected("a", 7)
    clock.advance(EJECT_S)
    ejections.note_sent("a")
    assert not ejections.is_ejected("a", 8)
    assert [ejections.note_pace("a", is_slow=True) for _ in range(FAILURES)] == [False] * 4 + [True]
    clock.advance(2 * EJECT_S - 1)
    assert ejections.is_ejected("a", 8)


def test_who_left_is_forgotten() -> None:
    """Records do not outlive their replicas."""
    ejections = Ejections(VirtualClock())
    ejected(ejections, "a")
    ejected(ejections, "b")
    ejections.keep_only({"b"})
    assert not ejections.is_ejected("a", 0)
    assert ejections.is_ejected("b", 0)
    ejections.keep_only(())
    assert not ejections
