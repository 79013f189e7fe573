"""The circuit breaker: whether a store is worth asking, from how the last calls ended.

Closed, it lets everything pass. It opens after `max_failures` failures in a row, or when calls have
failed for `max_failing_s`, or at once where the store refuses (out of memory, read only): asking again
soon cannot help. Open, it lets nothing pass until a jittered while has gone by; then one attempt at a
time, whose end decides. Refusals double the while, up to `max_retry_s`; a dead store is asked again
steadily, so that it is noticed soon after it came back.

Pure; not thread-safe: its holder has a lock. One for reads, one for writes: a store that refuses
writes still answers reads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from antiphon.kv.store import FaultKind

# The store works and says no: the answer will be the same for a while.
REFUSALS = frozenset(
    {FaultKind.OUT_OF_MEMORY, FaultKind.MISCONFIGURED, FaultKind.READ_ONLY, FaultKind.DENIED, FaultKind.FULL}
)


class BreakerState(enum.StrEnum):
    """A closed set: metrics use it as a label."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one attempt is under way


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When it opens, and how long it waits before it tries again."""

    max_failures: int = 3
    max_failing_s: float = 1.0
    min_retry_s: float = 0.25
    max_retry_s: float = 30.0  # reached by refusals only

    def __post_init__(self) -> None:
        if self.max_failures < 1 or not 0 < self.min_retry_s <= self.max_retry_s:
            raise ValueError(f"a breaker needs a failure and a pause: {self}")


class Breaker:
    """`random` gives numbers in [0, 1) for the jitter."""

    def __init__(self, settings: BreakerSettings, random: Callable[[], float]) -> None:
        self._settings = settings
        self._random = random
        self.state = BreakerState.CLOSED
        self.num_opened = 0
        self._num_failures = 0
        self._failing_since_s = 0.0
        self._retry_s = 0.0
        self._next_try_s = 0.0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    @property
    def next_try_s(self) -> float | None:
        """When the next attempt may begin; None where nothing is to be waited for."""
        return self._next_try_s if self.state is BreakerState.OPEN else None

    def may_try(self, now: float) -> bool:
        """Whether a call may go out now. A True of an open breaker is the one attempt: report its end."""
        if self.state is BreakerState.OPEN and now >= self._next_try_s:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def succeed(self) -> None:
        """A call was answered. Late news from before it opened count too: the store lives."""
        self.state = BreakerState.CLOSED
        self._num_failures = 0
        self._retry_s = 0.0

    def fail(self, now: float, kind: FaultKind) -> None:
        """A call failed."""
        if self._num_failures == 0:
            self._failing_since_s = now
        self._num_failures += 1
        if self.state is BreakerState.OPEN:
            return  # began before it opened: nothing new
        settings = self._settings
        is_over = (
            self._num_failures >= settings.max_failures
            or now - self._failing_since_s >= settings.max_failing_s
            or kind in REFUSALS
        )
        if self.state is BreakerState.HALF_OPEN or is_over:
            self._open(now, kind)

    def _open(self, now: float, kind: FaultKind) -> None:
        settings = self._settings
        if self.state is BreakerState.CLOSED:
            self.num_opened += 1
        longer = 2 * self._retry_s if kind in REFUSALS else 0.0
        self._retry_s = min(max(longer, settings.min_retry_s), settings.max_retry_s)
        self._next_try_s = now + self._retry_s * (1 + self._random())
        self.state = BreakerState.OPEN
