"""Sends each generation to a worker, and carries answers on whose worker was lost.

Before the first token of an answer any replica of its model may take it over; after it one of the
same namespace, which goes on from the ids received, so that the client sees neither a gap nor a
change in the text. Where no replica can take an answer now, it waits for one, parked, for `PARKED_S`.
Invariants: a choice is computed by one attempt at a time (two while hedged); an answer that cannot go
on ends, in words of the worker or as lost; parked choices are bounded. Does not know text or tenants.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from antiphon.core.clock import Clock, WallClock
from antiphon.core.errors import BadRequest, NoReplica
from antiphon.core.generation import Generation, Terminal
from antiphon.core.wire import Blocks
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.failover import Cause, continuations, may_take
from antiphon.router.fleet import Fleet
from antiphon.router.link import Failure, WorkerLink
from antiphon.router.picker import Pick, Picker
from antiphon.router.rivals import PolicyName, policy_named
from antiphon.router.splitter import Outcome, Splitter

MAX_VAIN_MOVES = 3  # of an answer, without a token in between
PARKED_S = 15.0  # a worker that crashed is back by then, if it comes back
MAX_PARKED = 4096  # choices
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Parked:
    """Choices that wait for a replica."""

    answer: Answer
    choices: Sequence[int]
    cause: Cause
    until_s: float


class Dispatcher:
    """The answers of one gateway. `run()` keeps its links up until cancelled."""

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        log: Logger,
        draw: Callable[[], float] = random.random,
        clock: Clock | None = None,
        routing: PolicyName = PolicyName.COST,
    ) -> None:
        self._log = log
        self._clock = clock or WallClock()
        self.fleet = Fleet(urls, secret, self, log)
        self._picker = Picker(self.fleet, policy_named(routing), draw)
        self._splitter = Splitter(self._submit, self._go_on, log)
        self._parked: list[Parked] = []
        self._is_stopping = False

    @property
    def num_parked(self) -> int:
        """Choices that wait for a replica."""
        return sum(len(parked.choices) for parked in self._parked)

    @property
    def num_split(self) -> int:
        """Answers whose prompt is being computed at another worker than their own."""
        return self._splitter.num_open

    async def run(self) -> None:
        """Serve all links. Ends only when cancelled, and then every open answer has ended."""
        tasks = [
            asyncio.create_task(self.fleet.run(), name="fleet"),
            asyncio.create_task(self._watch(), name="watch"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_stopping = True  # before links are lost: nothing moves any more
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._end_parked(self._parked)
        for result in results:  # one ended by itself: say why
            if isinstance(result, Exception):
                raise result

    def start(self, generation: Generation) -> Answer:
        """Send a generation to the best replica. Raises NoReplica where none serves its model."""
        answer = Answer(generation)
        if generation.timeout_s is not None:
            answer.deadline_s = self._clock.now() + generation.timeout_s
        pick = self._picker.plan(generation)
        if pick.prefill is not None:
            self._splitter.begin(answer, pick)
        else:
            self._submit(pick, Attempt(answer, generation))
        return answer

    def link_is_up(self, link: WorkerLink) -> None:
        """A worker can be reached."""
        self._unpark()

    def link_is_down(self, link: WorkerLink, lost: Sequence[Attempt], *, was_draining: bool) -> None:
        """A worker was lost: what it had goes on elsewhere."""
        cause = Cause.DRAIN if was_draining else Cause.DEATH
        for attempt in lost:
            choices = attempt.open_choices
            attempt.take_away(choices)
            self._move(attempt.answer, choices, cause)

    def attempts_failed(self, link: WorkerLink, failures: Sequence[Failure]) -> None:
        """A worker gives answers back."""
        for failure in failures:
            answer = failure.attempt.answer
            if failure.finish is Terminal.ERROR:
                for choice in failure.choices:
                    answer.end(Terminal.ERROR, choice, failure.error)
            else:
                cause = Cause.DRAIN if link.load.draining else Cause.DEATH
                self._move(answer, failure.choices, cause)

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        """A worker says what has become of its blocks."""

    def _move(self, answer: Answer, choices: Sequence[int], cause: Cause) -> None:
        """Carry these choices on at another worker, now or, parked, in a moment."""
        choices = [choice for choice in choices if not self._is_cared_for(answer, choice)]
        if not choices:
            return
        if answer.generation.is_prefill_only:  # the answer it is for goes on without it
            _end(answer, choices, Terminal.LOST)
            return
        if self._is_stopping or not answer.may_move(MAX_VAIN_MOVES):
            _end(answer, choices, Terminal.LOST)
            return
        left = self._place(answer, choices, cause)
        if left:
            self._park(Parked(answer, left, cause, self._clock.now() + PARKED_S))

    def _is_cared_for(self, answer: Answer, choice: int) -> bool:
        """It has ended, ends here, or is being computed by another attempt."""
        if len(answer.received[choice]) >= answer.generation.sampling.max_tokens:
            answer.end(Terminal.LENGTH, choice)  # only its end was lost
        return not answer.is_open(choice) or any(attempt.has(choice) for attempt in answer.attempts)

    def _place(self, answer: Answer, choices: Sequence[int], cause: Cause) -> list[int]:
        """Send these choices to replicas; those that nobody takes now are returned."""
        left_s = None if answer.deadline_s is None else answer.deadline_s - self._clock.now()
        if left_s is not None and left_s <= 0:
            _end(answer, choices, Terminal.DEADLINE)
            return []
        if not any(link.takes_work and may_take(answer, link.info) for link in self.fleet.links):
            return list(choices)  # before anything is copied
        left: list[int] = []
        parts = continuations(answer.generation, answer.received, choices, answer.num_moves + 1, left_s)
        for part in parts:
            pick = self._pick(answer, part)
            if pick is None:
                left += part.choices
            else:
                self._submit(pick, Attempt(answer, part))
        num_moved = len(choices) - len(left)
        if num_moved:
            answer.note_move()
            self._log.info(
                "answer.moved",
                generation=answer.generation.id,
                reason=cause.value,
                num_choices=num_moved,
                num_received=answer.num_received,
            )
        return left

    def _go_on(self, answer: Answer, pick: Pick, outcome: Outcome) -> None:
        """An answer's prompt was computed elsewhere, or was not and will be where it goes."""
        choices = list(answer.generation.choices)
        if outcome is Outcome.COMPUTED and pick.link.takes_work and not self._is_stopping:
            left_s = None if answer.deadline_s is None else answer.deadline_s - self._clock.now()
            generation = msgspec.structs.replace(answer.generation, timeout_s=left_s)
            self._submit(pick, Attempt(answer, generation))
        else:
            self._move(answer, choices, Cause.UNSPLIT)

    def _submit(self, pick: Pick, attempt: Attempt) -> None:
        attempt.sent_s = self._clock.now()
        attempt.answer.route = pick.route
        try:
            pick.link.submit(attempt, pick.num_uncached)
        except (NoReplica, BadRequest):
            attempt.take_away(attempt.open_choices)
            raise

    def _pick(
        self, answer: Answer, generation: Generation, avoid: Collection[WorkerLink] = ()
    ) -> Pick | None:
        """The best replica that may carry this on; none of `avoid`."""
        barred = {*avoid, *(link for link in self.fleet.links if not may_take(answer, link.info))}
        try:
            pick = self._picker.pick(generation, barred)
        except NoReplica:
            return None
        return None if pick.link in barred else pick

    def _park(self, parked: Parked) -> None:
        if self.num_parked + len(parked.choices) > MAX_PARKED:
            self._end_parked([parked])
        else:
            self._parked.append(parked)

    def _unpark(self) -> None:
        """Try again for all that is parked; end what waited too long."""
        waiting, self._parked = self._parked, []
        now = self._clock.now()
        for parked in waiting:
            choices = [choice for choice in parked.choices if parked.answer.is_open(choice)]
            left = self._place(parked.answer, choices, parked.cause) if choices else []
            if left:
                again = replace(parked, choices=left)
                if parked.until_s <= now:
                    self._end_parked([again])
                else:
                    self._parked.append(again)

    def _end_parked(self, parked: Sequence[Parked]) -> None:
        for each in parked:
            _end(each.answer, each.choices, Terminal.LOST)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._parked:
                self._unpark()


def _end(answer: Answer, choices: Sequence[int], finish: Terminal) -> None:
    for choice in choices:
        answer.end(finish, choice)
