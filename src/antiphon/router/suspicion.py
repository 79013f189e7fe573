"""When a silent worker is taken for dead before its link is. Pure.

A worker speaks at each step and, idle, at each heartbeat. One that is silent for longer than is usual
for it is suspect. Two things keep a busy machine from calling everybody dead: silence counts only in
time that this gateway was awake itself (a tick that comes late adds no more than two ticks), and what
is usual is measured, the longest pause of late, so that a worker that was suspected wrongly is given
more time from then on. That somebody else does speak is for the caller to see to.
"""

from __future__ import annotations

import math

from antiphon.core.wire import HEARTBEAT_S

TICK_S = 0.05
LEAST_S, MOST_S = 0.4, 1.5
_MARGIN_S = 0.1
_MEMORY_S = 10.0  # what was usual is forgotten with this time constant


class Silence:
    """How one link keeps silent, told tick by tick."""

    def __init__(self, heard_s: float) -> None:
        self.silent_s = 0.0
        self._usual_s = HEARTBEAT_S
        self._heard_s = heard_s

    @property
    def limit_s(self) -> float:
        """Silence beyond this is suspect."""
        return min(MOST_S, max(LEAST_S, 2 * self._usual_s + _MARGIN_S))

    def tick(self, elapsed_s: float, heard_s: float) -> bool:
        """Time has passed; the link was heard last at `heard_s`. True where it is suspect."""
        self._usual_s *= math.exp(-elapsed_s / _MEMORY_S)
        if heard_s != self._heard_s:
            self._heard_s = heard_s
            self._usual_s = max(self._usual_s, self.silent_s)
            self.silent_s = 0.0
        else:
            self.silent_s += min(elapsed_s, 2 * TICK_S)
        return self.silent_s > self.limit_s
