"""Carries choices on at other replicas: now, or parked until one takes them.

Before the first token of an answer any replica of its model may take it over; after it one of the
same namespace, which goes on from the ids received, so that the client sees neither a gap nor a
change in the text. A suspect of killing workers (quarantine.py) is alone among its kind where it goes.
Invariants: a choice that cannot go on ends, within `PARKED_S`; parked choices are bounded. Does not
decide that something moves: that is the dispatcher's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from antiphon.core.clock import Clock
from antiphon.core.errors import AntiphonError, NoReplica
from antiphon.core.generation import Generation, Terminal
from antiphon.obs.log import Logger
from antiphon.obs.metrics import FailoverMetrics
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.failover import Cause, continuations, may_take
from antiphon.router.fleet import Fleet
from antiphon.router.link import WorkerLink
from antiphon.router.picker import Pick, Picker

MAX_VAIN_MOVES = 3  # of an answer, without a token in between
MAX_MOVES = 16  # of an answer that gets on a little at each worker
PARKED_S = 15.0  # a worker that crashed is back by then, if it comes back
PROBATION_S = 5.0  # a suspect that waited so long for a replica without another one goes on anyhow
MAX_PARKED = 4096  # choices


@dataclass(frozen=True, slots=True)
class _Parked:
    answer: Answer
    choices: Sequence[int]
    cause: Cause
    since_s: float


class Mover:
    """The moves of one gateway's answers."""

    def __init__(
        self, fleet: Fleet, picker: Picker, clock: Clock, log: Logger, metrics: FailoverMetrics
    ) -> None:
        self.is_stopping = False  # nothing moves any more
        self._fleet = fleet
        self._picker = picker
        self._clock = clock
        self._log = log
        self._metrics = metrics
        self._parked: list[_Parked] = []

    @property
    def num_parked(self) -> int:
        """Choices that wait for a replica."""
        return sum(len(parked.choices) for parked in self._parked)

    def submit(self, pick: Pick, attempt: Attempt) -> None:
        """Send it. Raises NoReplica, BadRequest; then nothing is left of the attempt."""
        attempt.sent_s = attempt.heard_s = self._clock.now()
        attempt.answer.route = pick.route
        try:
            pick.link.submit(attempt, pick.num_uncached)
        except AntiphonError:
            attempt.take_away(attempt.open_choices)
            raise
        for choice in attempt.generation.choices:
            if not attempt.answer.is_open(choice):
                attempt.abort(choice)  # it ended before this was sent: its worker cannot know

    def move(self, answer: Answer, choices: Sequence[int], cause: Cause) -> None:
        """Carry these choices on at another worker, now or, parked, in a moment."""
        choices = self.orphans(answer, choices)
        if not choices:
            return
        if self.is_stopping or answer.generation.is_prefill_only or not self._may_move(answer):
            _end(answer, choices, Terminal.LOST)  # an answer whose prompt this was to be goes on without it
            return
        left = self._place(answer, choices, cause, ())
        if not left:
            return
        if self.num_parked + len(left) > MAX_PARKED:
            _end(answer, left, Terminal.LOST)
        else:
            self._parked.append(_Parked(answer, left, cause, self._clock.now()))
            self._metrics.parked.set(self.num_parked)

    def try_elsewhere(
        self, answer: Answer, choices: Sequence[int], cause: Cause, avoid: WorkerLink
    ) -> list[int]:
        """Carry them on at another worker than this one; those for which there is none now are returned."""
        orphans = self.orphans(answer, choices)
        return self._place(answer, orphans, cause, (avoid,)) if orphans else []

    def pick(self, answer: Answer, generation: Generation, avoid: Collection[WorkerLink] = ()) -> Pick | None:
        """The best replica that may carry this on; none of `avoid`."""
        barred = {*avoid, *(link for link in self._fleet.links if not may_take(answer, link.info))}
        try:
            pick = self._picker.pick(generation, barred)
        except NoReplica:
            return None
        return None if pick.link in barred else pick

    def has_other(self, answer: Answer, link: WorkerLink) -> bool:
        """Whether another replica than this one could carry it on now."""
        others = (other for other in self._fleet.links if other is not link and other.takes_work)
        return any(may_take(answer, other.info) for other in others)

    def orphans(self, answer: Answer, choices: Sequence[int]) -> list[int]:
        """Those that nobody computes and that have not ended, nor do now."""
        for choice in choices:
            if len(answer.received[choice]) >= answer.generation.sampling.max_tokens:
                answer.end(Terminal.LENGTH, choice)  # only its end was lost
        return [
            choice
            for choice in choices
            if answer.is_open(choice) and not any(attempt.has(choice) for attempt in answer.attempts)
        ]

    def unpark(self) -> None:
        """Try again for all that is parked; end what waited too long."""
        waiting, self._parked = self._parked, []
        for parked in waiting:
            choices = [choice for choice in parked.choices if parked.answer.is_open(choice)]
            left = self._place(parked.answer, choices, parked.cause, (), parked.since_s) if choices else []
            if left and parked.since_s + PARKED_S <= self._clock.now():
                _end(parked.answer, left, Terminal.LOST)
            elif left:
                self._parked.append(replace(parked, choices=left))
        self._metrics.parked.set(self.num_parked)

    def end_parked(self) -> None:
        """Nothing that waits will go on."""
        waiting, self._parked = self._parked, []
        for parked in waiting:
            _end(parked.answer, parked.choices, Terminal.LOST)

    def _may_move(self, answer: Answer) -> bool:
        return answer.may_move(MAX_VAIN_MOVES) and answer.num_moves < MAX_MOVES

    def _place(
        self,
        answer: Answer,
        choices: Sequence[int],
        cause: Cause,
        avoid: Collection[WorkerLink],
        since_s: float | None = None,
    ) -> list[int]:
        """Send these choices to replicas; those that nobody takes now are returned."""
        left_s = None if answer.deadline_s is None else answer.deadline_s - self._clock.now()
        if left_s is not None and left_s <= 0:
            _end(answer, choices, Terminal.DEADLINE)
            return []
        is_patient = since_s is None or self._clock.now() < since_s + PROBATION_S
        if answer.num_suspicions and is_patient:
            avoid = [*avoid, *(link for link in self._fleet.links if _is_trying(link, answer))]
        takers = (link for link in self._fleet.links if link.takes_work and link not in avoid)
        if not any(may_take(answer, link.info) for link in takers):
            return list(choices)  # before anything is copied
        left: list[int] = []
        parts = continuations(answer.generation, answer.received, choices, answer.num_moves + 1, left_s)
        for part in parts:
            pick = self.pick(answer, part, avoid)
            if pick is None:
                left += part.choices
                continue
            try:
                self.submit(pick, Attempt(answer, part))
            except AntiphonError:
                _end(answer, list(part.choices), Terminal.LOST)
        self._tell(answer, len(choices) - len(left), cause)
        return left

    def _tell(self, answer: Answer, num_moved: int, cause: Cause) -> None:
        if not num_moved:
            return
        answer.note_move()
        self._metrics.moves.labels(cause.value).inc(num_moved)
        self._log.info(
            "answer.moved",
            generation=answer.generation.id,
            reason=cause.value,
            num_choices=num_moved,
            num_received=answer.num_received,
            route=answer.route,
        )


def _is_trying(link: WorkerLink, answer: Answer) -> bool:
    """Whether another suspect has not spoken there yet."""
    return any(
        attempt.answer.num_suspicions and not attempt.has_spoken and attempt.answer is not answer
        for attempt in link.attempts
    )


def _end(answer: Answer, choices: Sequence[int], finish: Terminal) -> None:
    for choice in choices:
        answer.end(finish, choice)
