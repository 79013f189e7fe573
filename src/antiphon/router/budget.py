"""How much work a gateway may ask for twice. Pure.

A bucket that requests fill: each brings `SHARE` of a token, a retry takes one, so that retries stay
below that share of the requests whatever fails. A small reserve, and a trickle with time, let single
faults of a quiet gateway be mended too.

What a dead worker had is not paid from here: such moves cannot grow without more workers dying, each
answer was admitted once, and losing 32 answers for want of budget is the fault that moves are there to
prevent. Everything that a slow or failing fleet could multiply is: retries of failed steps and of
overdue answers, hedges, and every move after the first of an answer whose worker is merely silent.
"""

from __future__ import annotations

from antiphon.core.clock import Clock

SHARE = 0.1
RESERVE = 3.0
MOST = 10.0
TRICKLE_PER_S = 0.1


class RetryBudget:
    """One gateway's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = RESERVE
        self._at_s = clock.now()

    def note_request(self) -> None:
        """A client's request was sent to a worker."""
        self._tokens = min(MOST, self._tokens + SHARE)

    def take(self) -> bool:
        """Whether one more retry may be made; if so it is paid."""
        now = self._clock.now()
        self._tokens = min(MOST, self._tokens + TRICKLE_PER_S * (now - self._at_s))
        self._at_s = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
