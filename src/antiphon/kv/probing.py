"""When to measure the store off the request path.

A probe is due when the breaker lets one attempt out, and every so often while requests are being
refused because the store is slow: they bring no measurements themselves. Where nobody asked for a while
nobody needs to know, and a closed breaker is left alone.

Pure; not thread-safe: the fetcher's lock guards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.kvblock import KvBlock
from antiphon.kv.breaker import Breaker

_PAUSE_S = 0.25
_WANTED_S = 10.0  # after the last refusal


@dataclass(slots=True)
class ProbePlan:
    """`blocks`: what to ask the store for, the last ones wanted of it. The first probe is due at once."""

    breaker: Breaker
    next_s: float
    wanted_until_s: float
    blocks: Sequence[KvBlock] = ()
    num_begun: int = 0
    _is_under_way: bool = False

    @classmethod
    def starting(cls, breaker: Breaker, now: float) -> ProbePlan:
        return cls(breaker, now, now)

    def refuse(self, now: float) -> None:
        """A request was told not to fetch."""
        if now > self.wanted_until_s:
            self.next_s = now  # measured long ago: begin at once
        self.wanted_until_s = now + _WANTED_S

    def begin(self, now: float) -> bool:
        """Whether a probe has to begin now; if so report its end."""
        due_s = self.due_s
        if due_s is None or now < due_s or not self.breaker.may_try(now):
            return False
        self._is_under_way = True
        self.num_begun += 1
        return True

    def end(self, now: float) -> None:
        """The probe is over, and the breaker knows how it went."""
        self._is_under_way = False
        self.next_s = now + _PAUSE_S

    @property
    def due_s(self) -> float | None:
        """When the next probe is due; None where nothing has to be measured."""
        if self._is_under_way:
            return None
        if not self.breaker.is_closed:
            return self.breaker.next_try_s
        return self.next_s if self.next_s <= self.wanted_until_s else None
