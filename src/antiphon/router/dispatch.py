"""Sends each generation to a worker, and decides what moves when workers die, stall or fail.

What was open on a worker that is lost goes on elsewhere (mover.py), at no cost; what could be multiplied
by a slow or failing fleet is paid from a budget (budget.py). A silent worker loses its answers before
its link is lost; one whose answers fail again and again gets no new ones (ejection.py); a request that
kills workers is found and kept away (quarantine.py).
Invariants: a choice is computed by one attempt at a time (two while hedged); an answer that cannot go
on ends, in words of its worker or as lost. Does not know text or tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from antiphon.core.clock import WallClock
from antiphon.core.errors import AntiphonError, Quarantined
from antiphon.core.generation import Generation, Terminal
from antiphon.core.wire import Blocks
from antiphon.obs.log import Logger
from antiphon.obs.metrics import FailoverMetrics, GatewayMetrics
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.budget import RetryBudget
from antiphon.router.directorywatch import DirectoryWatch
from antiphon.router.ejection import Ejections
from antiphon.router.failover import Cause
from antiphon.router.fleet import Fleet
from antiphon.router.link import Failure, WorkerLink
from antiphon.router.mover import Mover
from antiphon.router.picker import Pick, Picker
from antiphon.router.quarantine import Leavers, Quarantine, culprit
from antiphon.router.rivals import PolicyName, policy_named
from antiphon.router.splitter import Outcome, Splitter
from antiphon.router.survey import Survey
from antiphon.router.suspicion import TICK_S
from antiphon.router.watch import Patience, Watch

_QUARANTINED = "Workers died of requests like this one; it is not tried again for some minutes."


@dataclass(frozen=True, slots=True)
class FailureHandling:
    """How long a gateway waits for workers, and where it counts what it does about them."""

    patience: Patience = field(default_factory=Patience)
    metrics: FailoverMetrics = field(default_factory=lambda: GatewayMetrics().failover)


class Dispatcher:
    """The answers of one gateway. `run()` keeps its links up until cancelled."""

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        log: Logger,
        draw: Callable[[], float] = random.random,
        routing: PolicyName = PolicyName.COST,
        failure: FailureHandling | None = None,
    ) -> None:
        failure = failure or FailureHandling()
        clock = WallClock()  # the event loop's: links stamp with that
        self._log = log
        self._clock = clock
        self._metrics = failure.metrics
        self.fleet = Fleet(urls, secret, self, log)
        self.survey = Survey(clock, draw, shows_all=routing.compares_all)
        self.directory_watch = DirectoryWatch(self.survey.directory, clock, log)
        self._picker = Picker(self.survey, policy_named(routing), draw)
        self._mover = Mover(self.fleet, self._picker, clock, log, failure.metrics)
        self._splitter = Splitter(self._mover.submit, self._go_on, failure.metrics, log)
        self._watch = Watch(self.fleet, failure.patience, clock)
        self._budget = RetryBudget(clock)
        self._ejections = Ejections(clock)
        self._quarantine = Quarantine(clock)
        self._leavers = Leavers()

    @property
    def num_parked(self) -> int:
        """Choices that wait for a replica."""
        return self._mover.num_parked

    @property
    def num_split(self) -> int:
        """Answers whose prompt is being computed at another worker than their own."""
        return self._splitter.num_open

    async def run(self) -> None:
        """Serve all links. Ends only when cancelled, and then every open answer has ended."""
        tasks = [
            asyncio.create_task(self.fleet.run(), name="fleet"),
            asyncio.create_task(self._keep_watch(), name="watch"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._mover.is_stopping = True  # before links are lost
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._mover.end_parked()
        for result in results:  # one ended by itself: say why
            if isinstance(result, Exception):
                raise result

    def start(self, generation: Generation) -> Answer:
        """Send a generation to the best replica. Raises NoReplica, Quarantined."""
        if self._quarantine.holds(generation):
            self._metrics.quarantined.labels("refused").inc()
            raise Quarantined(_QUARANTINED)
        answer = Answer(generation)
        if generation.timeout_s is not None:
            answer.deadline_s = self._clock.now() + generation.timeout_s
        pick = self._picker.plan(generation)
        if pick.prefill is not None:
            self._splitter.begin(answer, pick)
        else:
            self._mover.submit(pick, Attempt(answer, generation))
        self._budget.note_request()
        self._ejections.note_sent(pick.link.url)
        self._look_at_failures()  # one probe is enough
        return answer

    def tick(self) -> None:
        """Look after all that is open. `run` does it every `TICK_S`."""
        found = self._watch.tick()
        for link in found.recovered:
            link.is_suspect = False
            self._leavers.forget(link.url)
            self.survey.load_changed(link)
            self._log.info("link.recovered", worker=link.url)
        for link in found.suspects:
            self._leave_silent(link)
        for link in {link.url: link for link, _, _ in found.overdue}.values():
            self._note_failure(link)
        for link, attempt, cause in found.overdue:
            self._leave_overdue(link, attempt, cause)
        for link, attempt in found.slow:
            self._hedge(link, attempt)
        for link, is_slow in found.paces:
            self._note_pace(link, is_slow=is_slow)
        self._look_at_failures()
        self.directory_watch.tick(self.fleet.links)
        if self._mover.num_parked:
            self._mover.unpark()

    def link_is_up(self, link: WorkerLink) -> None:
        """A worker can be reached."""
        self.survey.link_is_up(link)
        self._look_at_failures()
        self._mover.unpark()

    def link_is_down(self, link: WorkerLink, lost: Sequence[Attempt], *, was_draining: bool) -> None:
        """A worker was lost: what it had goes on elsewhere."""
        self.survey.link_is_down(link)
        failures = [Failure(attempt, Terminal.LOST, None, attempt.open_choices) for attempt in lost]
        for failure in failures:
            failure.attempt.take_away(failure.choices)
        self._carry_on(
            link, failures, Cause.DRAIN if was_draining else Cause.DEATH, self._leavers.take(link.url)
        )

    def attempts_failed(self, link: WorkerLink, failures: Sequence[Failure]) -> None:
        """A worker gives answers back, all that one frame named."""
        errors = [failure for failure in failures if failure.finish is Terminal.ERROR]
        dead = [failure for failure in failures if failure.finish is Terminal.LOST]
        back = [f for f in failures if f.finish not in (Terminal.ERROR, Terminal.LOST)]
        if errors:
            self._note_failure(link)
        for failure in errors:
            self._retry_error(link, failure)
        self._carry_on(link, dead, Cause.DRAIN if link.load.draining else Cause.DEATH)
        self._carry_on(link, back, Cause.DRAIN)

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        """A worker says what has become of its blocks."""
        self.survey.take_blocks(link, blocks)

    def load_changed(self, link: WorkerLink) -> None:
        """A worker has more to do, or less, or may get no more."""
        self.survey.load_changed(link)

    def _carry_on(
        self, link: WorkerLink, lost: Sequence[Failure], cause: Cause, left: Sequence[Answer] = ()
    ) -> None:
        """Move what was lost together: first those who had spoken, then the suspects. Some `left` before."""
        if cause is Cause.DEATH:
            if lost:
                self._note_failure(link)
            self._accuse(link, [*left, *(f.attempt.answer for f in lost if not f.attempt.has_spoken)])
        for failure in sorted(lost, key=lambda failure: not failure.attempt.has_spoken):
            self._mover.move(failure.attempt.answer, failure.choices, cause)

    def _accuse(self, link: WorkerLink, suspects: Sequence[Answer]) -> None:
        """A worker died under these before they spoke; end the one that is known to have killed it.

        One that is short of memory may lose its link, take another, and only then die: once is enough.
        """
        died = (link.url, link.life)
        suspects = list({id(answer): answer for answer in suspects if not answer.is_finished}.values())
        killer = culprit(suspects)
        fresh = [answer for answer in suspects if answer.suspected_at != died]
        for answer in fresh:
            answer.num_suspicions += 1
            answer.suspected_at = died
        if killer is None or killer not in fresh:
            return
        self._quarantine.add(killer.generation)
        self._metrics.quarantined.labels("found").inc()
        self._log.error("request.quarantined", generation=killer.generation.id)
        killer.abort(finish=Terminal.REFUSED, error=f"{Quarantined.code}: {_QUARANTINED}")

    def _retry_error(self, link: WorkerLink, failure: Failure) -> None:
        """A step failed: once more, elsewhere, if the budget allows; else its words are the end."""
        answer = failure.attempt.answer
        choices = left = self._mover.orphans(answer, failure.choices)
        if not choices:
            return  # its rival goes on
        may_move = answer.may_move(1) and not answer.generation.is_prefill_only
        if may_move and self._mover.has_other(answer, link) and self._pay(Cause.ERROR):
            left = self._mover.try_elsewhere(answer, choices, Cause.ERROR, link)
        for choice in left:
            answer.end(Terminal.ERROR, choice, failure.error)

    def _go_on(self, answer: Answer, pick: Pick, outcome: Outcome) -> None:
        """An answer's prompt was computed elsewhere, or was not and will be where it goes."""
        if outcome is Outcome.COMPUTED and pick.link.takes_work and not self._mover.is_stopping:
            left_s = None if answer.deadline_s is None else answer.deadline_s - self._clock.now()
            generation = msgspec.structs.replace(answer.generation, timeout_s=left_s)
            with contextlib.suppress(AntiphonError):  # then it is moved
                self._mover.submit(pick, Attempt(answer, generation))
                return
        self._mover.move(answer, list(answer.generation.choices), Cause.UNSPLIT)

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _leave_silent(self, link: WorkerLink) -> None:
        """A worker is silent while others speak: its answers go on there, as many as the budget allows.

        The first such move of an answer is free: one fault, one move. Those that stay wait for the worker,
        or for its link to be lost.
        """
        link.is_suspect = True
        self.survey.load_changed(link)
        self._metrics.stalls.inc()
        self._note_failure(link)
        self._log.warning("link.silent", worker=link.url, num_answers=link.num_open_answers)
        for attempt in link.attempts:
            answer = attempt.answer
            if not self._mover.has_other(answer, link):
                continue
            if answer.num_stalls and not self._pay(Cause.STALL):
                continue
            answer.num_stalls += 1
            if not attempt.has_spoken:
                self._leavers.note(link.url, answer)
            self._leave(attempt, Cause.STALL)

    def _leave_overdue(self, link: WorkerLink, attempt: Attempt, cause: Cause) -> None:
        """Nothing came of it for too long."""
        answer = attempt.answer
        if attempt.rival is not None:
            attempt.drop()  # the other goes on
        elif answer.may_move(1) and self._mover.has_other(answer, link) and self._pay(cause):
            choices = attempt.open_choices
            attempt.drop()
            for choice in self._mover.try_elsewhere(answer, choices, cause, link):
                answer.end(Terminal.DEADLINE, choice)
        else:
            for choice in attempt.open_choices:
                answer.abort(choice, Terminal.DEADLINE)

    def _leave(self, attempt: Attempt, cause: Cause) -> None:
        choices = attempt.open_choices
        attempt.drop()
        self._mover.move(attempt.answer, choices, cause)

    def _hedge(self, link: WorkerLink, attempt: Attempt) -> None:
        """Its first token is slow: compute it at another worker too; who speaks first goes on alone."""
        attempt.may_hedge = False
        if not attempt.open_choices:
            return  # it has just moved
        answer = attempt.answer
        generation = msgspec.structs.replace(attempt.generation, id=f"{attempt.generation.id}~h")
        pick = self._mover.pick(answer, generation, (link,))
        if pick is None or not self._pay(Cause.HEDGE):
            return
        rival = Attempt(answer, generation)
        rival.may_hedge = False
        try:
            self._mover.submit(pick, rival)
        except AntiphonError:
            return  # the first one goes on
        attempt.rival, rival.rival = rival, attempt
        self._metrics.moves.labels(Cause.HEDGE.value).inc(rival.num_open_choices)
        self._log.info("answer.hedged", generation=answer.generation.id, route=pick.route)

    def _pay(self, cause: Cause) -> bool:
        if self._budget.take():
            return True
        self._metrics.refused_moves.labels(cause.value).inc()
        return False

    def _note_failure(self, link: WorkerLink) -> None:
        if self._ejections.note_failure(link.url, link.num_completed):
            self._tell_ejected(link, "failures")
        self._look_at_failures()

    def _note_pace(self, link: WorkerLink, *, is_slow: bool) -> None:
        if self._ejections.note_pace(link.url, is_slow=is_slow):
            self._tell_ejected(link, "slow")

    def _tell_ejected(self, link: WorkerLink, reason: str) -> None:
        self._metrics.ejections.inc()
        self._log.warning("worker.ejected", worker=link.url, reason=reason)

    def _look_at_failures(self) -> None:
        """Bar the links whose workers are ejected now, model by model; never more than half of them."""
        if not self._ejections:
            return
        models: dict[str, list[WorkerLink]] = {}
        self._ejections.keep_only({link.url for link in self.fleet.links})
        for link in self.fleet.links:
            if link.info is not None:
                models.setdefault(link.info.model, []).append(link)
        for links in models.values():
            barred = self._ejections.barred([(link.url, link.num_completed) for link in links])
            for link in links:
                if link.is_barred != (link.url in barred):
                    link.is_barred = not link.is_barred
                    self.survey.load_changed(link)
