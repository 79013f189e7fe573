"""Whether an upstream is worth asking, from how the last requests to it ended.

After `MAX_FAILURES` failures in a row it is put aside for a while. When that has gone by, one request
may try it: its success brings the upstream back, its failure doubles the while, up to `MAX_ASIDE_S`. What the
client did wrong or gave up, and a server that is merely busy, are no failures: whoever knows calls
`excuse`. Pure; times are seconds of a clock that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_FAILURES = 5
MIN_ASIDE_S = 1.0
MAX_ASIDE_S = 30.0


class UpstreamHealth:
    """`random` gives numbers in [0, 1) for the jitter: many gateways must not probe in step."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._num_failures = 0
        self._aside_s = 0.0  # 0: not put aside
        self._until_s = 0.0
        self._is_probing = False

    @property
    def is_aside(self) -> bool:
        """Whether it gets no requests but one that tries it."""
        return self._aside_s > 0

    def may_try(self, now_s: float) -> bool:
        """Whether a request may go out now. Report its end, whatever it was."""
        if not self.is_aside:
            return True
        if self._is_probing or now_s < self._until_s:
            return False
        self._is_probing = True
        return True

    def retry_after_s(self, now_s: float) -> float:
        """How long it will stay aside at least."""
        return max(0.0, self._until_s - now_s) if self.is_aside else 0.0

    def succeed(self) -> None:
        """It answered."""
        self._num_failures = 0
        self._aside_s = 0.0
        self._is_probing = False

    def excuse(self) -> None:
        """A request ended without a word on the upstream's health."""
        self._is_probing = False

    def fail(self, now_s: float) -> None:
        """It could not be reached, was too slow, or answered what makes no sense."""
        self._num_failures += 1
        was_probe, self._is_probing = self._is_probing, False
        if self.is_aside and not was_probe:
            return  # began before it was put aside: nothing new
        if self.is_aside or self._num_failures >= MAX_FAILURES:
            self._aside_s = min(max(2 * self._aside_s, MIN_ASIDE_S), MAX_ASIDE_S)
            self._until_s = now_s + self._aside_s * (1 + 0.2 * self._random())
