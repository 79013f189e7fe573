"""Clocks: the wall's never goes back, the virtual one moves only when told."""

from __future__ import annotations

import pytest

from antiphon.core.clock import VirtualClock, WallClock


def test_the_wall_clock_does_not_go_back() -> None:
    """Many readings are in order."""
    clock = WallClock()
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)


def test_virtual_time_stands_until_advanced() -> None:
    """Nothing but `advance` moves it, and only forward."""
    clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1.0)
