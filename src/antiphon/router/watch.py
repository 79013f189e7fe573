"""Looks after open attempts, tick by tick: silent workers, overdue tokens, slow first tokens.

Reads links and attempts and says what is the matter; acting on it is the dispatcher's. A worker is
suspect only while another one of its model speaks: when nobody does, the fault is this gateway's or
the machine's, and nothing is gained by moving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.core.clock import Clock
from antiphon.core.wire import HEARTBEAT_S
from antiphon.router.attempt import Attempt
from antiphon.router.failover import Cause
from antiphon.router.fleet import Fleet
from antiphon.router.link import WorkerLink
from antiphon.router.pace import slow_ones
from antiphon.router.suspicion import Silence

_PACE_EVERY_S = 1.0
_SPEAKING_S = 1.5 * HEARTBEAT_S + 0.05  # who was heard so lately speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long answers wait for their worker before they go elsewhere."""

    first_token_s: float = 120.0
    token_s: float = 30.0  # between two tokens
    hedge_after_s: float | None = None  # a second copy after so long without a token; None: never


@dataclass(slots=True)
class Findings:
    """What one tick found."""

    suspects: list[WorkerLink] = field(default_factory=list)
    recovered: list[WorkerLink] = field(default_factory=list)
    overdue: list[tuple[WorkerLink, Attempt, Cause]] = field(default_factory=list)
    slow: list[tuple[WorkerLink, Attempt]] = field(default_factory=list)  # to be hedged
    paces: list[tuple[WorkerLink, bool]] = field(
        default_factory=list
    )  # whether it is far slower than its like


class Watch:
    """The eye of one gateway on its links."""

    def __init__(self, fleet: Fleet, patience: Patience, clock: Clock) -> None:
        self._fleet = fleet
        self._patience = patience
        self._clock = clock
        self._silences: dict[WorkerLink, Silence] = {}  # of links with open attempts
        self._at_s = self._paced_s = clock.now()

    def tick(self) -> Findings:
        """Look at everything once."""
        now = self._clock.now()
        elapsed_s, self._at_s = now - self._at_s, now
        found = Findings()
        busy = [
            link for link in self._fleet.links if link.is_up and (link.num_open_answers or link.is_suspect)
        ]
        self._silences = {link: self._silences.get(link) or Silence(link.heard_s) for link in busy}
        for link, silence in self._silences.items():
            is_suspect = silence.tick(elapsed_s, link.heard_s)
            if link.is_suspect and not is_suspect:
                found.recovered.append(link)
            elif is_suspect and not link.is_suspect and self._others_speak(link, now):
                found.suspects.append(link)
            found.overdue += self._overdue(link, now)
            found.slow += self._slow(link, now)
        if now - self._paced_s >= _PACE_EVERY_S:
            self._paced_s = now
            found.paces = self._paces()
        return found

    def _paces(self) -> list[tuple[WorkerLink, bool]]:
        families: dict[tuple[str, str], dict[str, WorkerLink]] = {}
        for link in self._fleet.links:
            if link.info is not None and not link.is_barred:
                family = families.setdefault((link.info.model, link.info.namespace), {})
                family[link.url] = link
        paces = []
        for family in families.values():
            slow = slow_ones({url: link.load.rates.step_s for url, link in family.items()})
            paces += [(link, url in slow) for url, link in family.items()]
        return paces

    def _others_speak(self, link: WorkerLink, now: float) -> bool:
        return any(
            other is not link
            and other.takes_work
            and other.info is not None
            and link.info is not None
            and other.info.model == link.info.model
            and now - other.heard_s < _SPEAKING_S
            for other in self._fleet.links
        )

    def _overdue(self, link: WorkerLink, now: float) -> Iterator[tuple[WorkerLink, Attempt, Cause]]:
        patience = self._patience
        for attempt in link.attempts:
            if attempt.generation.is_prefill_only:
                continue  # who waits for it has a deadline of its own
            limit_s = patience.token_s if attempt.has_spoken else patience.first_token_s
            if now - attempt.heard_s > limit_s:
                yield link, attempt, Cause.TOKEN if attempt.has_spoken else Cause.FIRST_TOKEN

    def _slow(self, link: WorkerLink, now: float) -> Iterator[tuple[WorkerLink, Attempt]]:
        after_s = self._patience.hedge_after_s
        if after_s is None:
            return
        for attempt in link.attempts:
            is_first = not attempt.has_spoken and not attempt.answer.has_started
            if is_first and attempt.may_hedge and now - attempt.sent_s > after_s:
                yield link, attempt
