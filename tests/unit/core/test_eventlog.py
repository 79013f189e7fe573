"""The numbered log of one answer: numbers, bounds, wake-ups, the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.eventlog import EventLog, EventsGone


@given(count=st.integers(0, 30), number=st.integers(0, 30), limit=st.integers(1, 40))
def test_a_reader_gets_all_from_its_number_or_is_told(count: int, number: int, limit: int) -> None:
    """Either everything from `number` on, or the number of the oldest event still held."""
    log: EventLog[int] = EventLog(limit)
    for event in range(count):
        assert log.append(event) == event
    first = max(0, count - limit)
    if number < first:
        with pytest.raises(EventsGone) as caught:
            log.since(number)
        assert caught.value.first == first
    else:
        assert log.since(number) == list(range(number, count))


def test_events_that_every_reader_has_can_be_forgotten() -> None:
    """Forgotten events are gone for good, numbers stay."""
    log: EventLog[str] = EventLog()
    for event in "abc":
        log.append(event)
    log.forget(2)
    assert log.since(2) == ["c"]
    assert log.next_number == 3
    with pytest.raises(EventsGone):
        log.since(1)


def test_listeners_hear_appends_and_the_close_until_they_leave() -> None:
    """One call per change, none after unsubscribing."""
    log: EventLog[str] = EventLog()
    heard: list[int] = []
    leave = log.subscribe(lambda: heard.append(log.next_number))
    log.append("a")
    log.close()
    leave()
    log.close()
    assert heard == [1, 1]


def test_nothing_follows_the_end() -> None:
    """Appending to a closed log is a mistake of ours."""
    log: EventLog[str] = EventLog()
    log.close()
    assert log.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        log.append("late")
