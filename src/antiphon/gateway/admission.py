"""The gate in front of the models: requests wait here until there is a place for them.

Owns one queue a model (router/admission.py decides the order and who is turned away) and the waiting. A
request is started by the gate itself, in the turn in which its place is found: what was let in is counted
before the next is looked at. Where a place is free and nobody waits, nothing waits.

Invariants: an entry leaves its queue in exactly one way, and then it never starts: given a place, turned
away, its time over, its client gone, nobody left to serve it. What started is settled once, by what it
used. A place at a worker is free when the worker's report says so; one at a server that answers for us when
the answer has ended here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from antiphon.core.clock import Clock
from antiphon.core.errors import AntiphonError
from antiphon.core.generation import Priority, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.course import Entry, Prepared, Source, Work, ended
from antiphon.gateway.urgency import class_name
from antiphon.obs.admissionmetrics import AdmissionMetrics
from antiphon.router.admission import (
    DISPLACED,
    QUEUE_FULL,
    WAIT_TOO_LONG,
    AdmissionQueue,
    QueueBounds,
    expired,
)
from antiphon.router.lane import Ticket
from antiphon.router.picker import no_replica
from antiphon.router.places import Places
from antiphon.router.room import Room
from antiphon.router.servicerate import Expectation

PATIENCE_S = 2.0  # with nobody to serve a model, for those that wait: a worker that restarts is not so quick
CLIENT_LEFT = "client-left"
NO_REPLICA = "no-replica"


class OpenGate:
    """Lets everything in at once."""

    def enter(self, model: str, prepared: Prepared, account: Account, *, may_wait: bool) -> Entry:
        return _Started(prepared.start())


class _Started:
    """An entry that had not to wait and is not counted."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def source(self) -> Source:
        return self._source

    def end(self, finish: Terminal) -> None:
        self._source.end(finish)


class _Entry:
    """A request that is counted: it waits, then it has a place, then it is settled."""

    def __init__(self, line: _Line, ticket: Ticket, prepared: Prepared, account: Account) -> None:
        self.line = line
        self.ticket = ticket
        self._prepared = prepared
        self._account = account
        self._source: Source | None = None
        self._is_settled = False
        self._place: asyncio.Future[Source] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_client_gone(self) -> bool:
        return self._account.is_client_gone

    def wait(self, longest_s: float) -> None:
        """It stands in the queue now, no longer than that."""
        loop = asyncio.get_running_loop()
        self._place = loop.create_future()
        self._timer = loop.call_later(longest_s, self.line.overstayed, self)

    async def source(self) -> Source:
        if self._place is not None:
            return await self._place
        assert self._source is not None
        return self._source

    def start(self, waited_s: float) -> None:
        """It has its place. Where it waited, what it raises goes to who waits for it."""
        self._account.waited_s = waited_s
        if self._place is None:
            self._source = self._prepared.start()
            return
        self._stop_timer()
        try:
            self._source = self._prepared.start()
        except Exception as error:  # noqa: BLE001 - handed on: it is raised where the request waits
            self._is_settled = True
            self.line.undo(self)
            self._tell(error)
        else:
            if not self._place.done():
                self._place.set_result(self._source)

    def refuse(self, error: AntiphonError, waited_s: float) -> None:
        """It left the queue, for this reason."""
        self._account.waited_s = waited_s
        self._is_settled = True
        self._stop_timer()
        self._tell(error)

    def end(self, finish: Terminal) -> None:
        if self._source is not None:
            self._source.end(finish)
        if self._is_settled:
            return
        if self._source is None:
            self.line.left(self, finish)
            return
        self._is_settled = True
        account, work = self._account, self._prepared.work
        self.line.settle(self.ticket, account, work)

    def _tell(self, error: Exception) -> None:
        if (
            self._place is not None and not self._place.done()
        ):  # it is done where the task that waits was cancelled
            self._place.set_exception(error)
            self._place.exception()  # its reader may be gone

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Line:
    """The queue of one model."""

    def __init__(self, model: str, gate: Admission) -> None:
        self.model = model
        self.queue = AdmissionQueue(gate.bounds)
        self.entries: dict[Ticket, _Entry] = {}  # that wait
        self.num_running = 0  # sequences let in that have not ended
        self.expectation = Expectation()
        self._gate = gate
        self._is_due = False
        self._patience: asyncio.TimerHandle | None = None

    def enter(self, ticket: Ticket, prepared: Prepared, account: Account, *, may_wait: bool) -> _Entry:
        """Start it where there is a place now, else let it wait. Raises why it cannot do either."""
        gate, now_s = self._gate, ticket.arrived_s
        places = gate.places
        if not places.is_served(self.model):
            raise no_replica(self.model)
        entry = _Entry(self, ticket, prepared, account)
        has_room = not self.queue and self._has_room(places.rooms(self.model, self.num_running), ticket)
        if not has_room and not may_wait:
            raise self.queue.busy(ticket, QUEUE_FULL, gate.draw())
        displaced = self.queue.join(ticket, now_s, gate.draw())
        if has_room:
            self._start(entry, now_s)
            return entry
        longest_s = min(gate.bounds.longest_wait_s[ticket.priority], ticket.deadline_s - now_s)
        entry.wait(longest_s)
        self.entries[ticket] = entry
        places.attend_to(self.model)
        for other in displaced:
            error = self.queue.busy(other, DISPLACED, gate.draw())
            self._refuse(self.entries.pop(other), error, now_s)
        return entry

    def has_news(self) -> None:
        """There may be room: look when whoever says so is done."""
        if not self._is_due and self.queue:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def overstayed(self, entry: _Entry) -> None:
        """It has waited as long as it may."""
        now_s = self._gate.clock.now()
        ticket = entry.ticket
        self._take_out(ticket, now_s)
        is_expired = ticket.deadline_s <= now_s
        error = expired() if is_expired else self.queue.busy(ticket, WAIT_TOO_LONG, self._gate.draw())
        self._refuse(entry, error, now_s)

    def left(self, entry: _Entry, finish: Terminal) -> None:
        """It was ended from outside while it waited."""
        now_s = self._gate.clock.now()
        self._take_out(entry.ticket, now_s)
        self._refuse(entry, ended(finish), now_s, CLIENT_LEFT if entry.is_client_gone else None)

    def settle(self, ticket: Ticket, account: Account, work: Work) -> None:
        """What was started has ended, and used so much."""
        self._give_back(ticket)
        num_prompt = account.num_prompt_tokens or work.num_prompt_tokens
        num_cached = min(account.num_cached_tokens, num_prompt)
        num_answer = account.num_answer_tokens
        self.queue.settle(ticket, num_prompt - num_cached + num_answer)
        if num_answer:
            self.expectation.learn(num_prompt, num_cached, num_answer / work.num_choices)

    def undo(self, entry: _Entry) -> None:
        """It could not be started."""
        self.queue.settle(entry.ticket, 0)
        self._give_back(entry.ticket)

    def _give_back(self, ticket: Ticket) -> None:
        self.num_running -= ticket.num_sequences
        self.has_news()

    def _look(self) -> None:
        self._is_due = False
        now_s = self._gate.clock.now()
        for room in self._gate.places.news(self.model, self.num_running):
            while (ticket := self.queue.head()) is not None and room.fits(ticket):
                room.take(ticket)
                self._start(self.entries.pop(ticket), now_s)
        if not self.queue:
            self._gate.places.forget(self.model)
        elif not self._gate.places.is_served(self.model) and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        if self._gate.places.is_served(self.model):
            return
        now_s = self._gate.clock.now()
        for ticket, entry in list(self.entries.items()):
            self._take_out(ticket, now_s)
            self._refuse(entry, no_replica(self.model), now_s)

    def _start(self, entry: _Entry, now_s: float) -> None:
        ticket = entry.ticket
        self.queue.take(ticket, now_s)
        self.num_running += ticket.num_sequences
        waited_s = now_s - ticket.arrived_s
        self._gate.metrics.wait_s.labels(class_name(ticket.priority)).observe(waited_s)
        with ExitStack() as failed:
            failed.callback(self.undo, entry)
            entry.start(waited_s)
            failed.pop_all()

    def _has_room(self, rooms: Iterator[Room], ticket: Ticket) -> bool:
        return any(room.fits(ticket) for room in rooms)

    def _take_out(self, ticket: Ticket, now_s: float) -> None:
        del self.entries[ticket]
        self.queue.leave(ticket, now_s)

    def _refuse(self, entry: _Entry, error: AntiphonError, now_s: float, reason: str | None = None) -> None:
        self._gate.count(self.model, entry.ticket.priority, reason or error.dropped_reason or NO_REPLICA)
        entry.refuse(error, now_s - entry.ticket.arrived_s)


class Admission:
    """The gate of one gateway. `draw` in [0, 1) spreads those who are to come back."""

    def __init__(
        self,
        places: Places,
        bounds: QueueBounds,
        metrics: AdmissionMetrics,
        clock: Clock,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.places = places
        self.bounds = bounds
        self.metrics = metrics
        self.clock = clock
        self.draw = draw
        self._lines: dict[str, _Line] = {}  # by model: names of the catalogue
        places.watch(self._has_news)

    def enter(self, model: str, prepared: Prepared, account: Account, *, may_wait: bool) -> Entry:
        """Ask for a place. Raises Busy, DeadlineExceeded, NoReplica, and what its start raises."""
        work = prepared.work
        if not work.num_answer_tokens:  # a prompt's echo: nobody computes anything
            return _Started(prepared.start())
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line(model, self)
        assert account.caller is not None  # CallerMiddleware: no request comes this far without one
        now_s = self.clock.now()
        num_tokens = line.expectation.num_tokens(
            work.num_prompt_tokens, work.num_answer_tokens, work.num_choices
        )
        ticket = Ticket(
            tenant=account.caller.tenant_id,
            priority=account.priority,
            num_tokens=num_tokens,
            deadline_s=now_s + account.left_s,
            arrived_s=now_s,
            num_prompt_tokens=work.num_prompt_tokens,
            num_sequences=work.num_choices,
        )
        try:
            return line.enter(ticket, prepared, account, may_wait=may_wait)
        except AntiphonError as error:
            if error.dropped_reason is not None:
                self.count(model, ticket.priority, error.dropped_reason)
            raise

    def count(self, model: str, priority: Priority, reason: str) -> None:
        """One was not started."""
        self.metrics.rejected.labels(model, reason, class_name(priority)).inc()

    def backlog(self, model: str) -> tuple[int, float]:
        """Tokens that wait for a place at this model, and the seconds until they have all started."""
        line = self._lines.get(model)
        return (0, 0.0) if line is None else (line.queue.num_tokens, line.queue.backlog_s)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        for model, line in self._lines.items():
            for priority, lane in line.queue.lanes.items():
                self.metrics.requests.labels(model, class_name(priority)).set(len(lane))
                self.metrics.tokens.labels(model, class_name(priority)).set(lane.num_tokens)

    def _has_news(self, model: str) -> None:
        line = self._lines.get(model)
        if line is not None:
            line.has_news()
