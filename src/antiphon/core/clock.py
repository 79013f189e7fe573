"""Time as a value that is handed in.

Owns the `Clock` seam: the wall clock of a served process and the virtual clock of tests and the
simulator. Nothing below the gateway calls `time` itself, so that the same scheduler runs on both.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back. The zero point has no meaning."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (never back)."""
        if seconds < 0:
            raise ValueError(f"time does not go back: advance({seconds})")
        self._now_s += seconds
