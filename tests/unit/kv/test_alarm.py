"""The alarm: each kind at most once a minute."""

from __future__ import annotations

from antiphon.core.clock import VirtualClock
from antiphon.kv.alarm import Alarm
from support.kvchains import Tales


def test_a_kind_is_told_once_a_minute() -> None:
    """The first of a minute is told, the rest only counted elsewhere."""
    clock, tales = VirtualClock(), Tales()
    alarm = Alarm(tales, clock)
    for _ in range(120):
        alarm.ring("denied", "as ever")
        clock.advance(1.0)
    assert tales.told == [("denied", "as ever")] * 2


def test_kinds_do_not_hide_each_other() -> None:
    """A second thing that goes wrong is news."""
    tales = Tales()
    alarm = Alarm(tales, VirtualClock())
    alarm.ring("denied", "a")
    alarm.ring("timeout", "b")
    assert tales.told == [("denied", "a"), ("timeout", "b")]
