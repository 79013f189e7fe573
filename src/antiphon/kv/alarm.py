"""Says what goes wrong with the store, once a minute at most for each kind.

The counters have every case; this is for the line in the log that somebody reads. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from antiphon.core.clock import Clock

Tell: TypeAlias = Callable[[str, str], None]
"""Takes a kind out of a closed set, and a detail for people. Called on any kv thread; must not block."""

_PAUSE_S = 60.0


class Alarm:
    """Hands on what is news."""

    def __init__(self, tell: Tell, clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._told_s: dict[str, float] = {}

    def ring(self, kind: str, detail: str) -> None:
        """Tell, unless this kind was told within the last minute."""
        now = self._clock.now()
        with self._lock:
            told_s = self._told_s.get(kind)
            if told_s is not None and now - told_s < _PAUSE_S:
                return
            self._told_s[kind] = now
        self._tell(kind, detail)
