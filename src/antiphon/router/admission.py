"""Who waits for a place, who comes next, who is turned away: the queue in front of one model. Pure.

Classes go in strict order, but each has a share of the service that it gets while it has waiters: with every
token that starts, the classes that wait earn their share of it, and one that has earned its next request is
next.
Within a class tenants share fairly (lane.py).

The queue is bounded in requests and tokens. A tenant alone may fill it. When it is full, who comes is
refused, unless another has more than its due: a less urgent class above its share, any class above
its share where one's own is below, or a heavier tenant of the same class. The newest request of the heaviest
tenant there is displaced.

A request that would wait too long is refused when it comes: by the tokens before it and the rate at which
they start. Too long is most of its time, or of its class's longest wait: a tenth of that where more than a
few of its class wait, and some have for a second without a break as long; a twentieth where its tenant's do
without any. A queue that empties again carries a burst over and is worth waiting in, one that stands only
makes everybody late.

Invariants: a ticket that joined leaves in exactly one way: taken, left or displaced; bounds hold after each
call; a class with waiters gets its share of what starts, less one request. No clock and no chance of its
own: both come in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from antiphon.core.errors import Busy, DeadlineExceeded
from antiphon.core.generation import Priority
from antiphon.router.lane import Lane, Ticket
from antiphon.router.servicerate import ServiceRate

QUEUE_FULL = "rejected-queue-full"
DISPLACED = "rejected-displaced"
WAIT_TOO_LONG = "rejected-wait-too-long"
EXPIRED = "rejected-expired"

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0

SHARES = {Priority.INTERACTIVE: 0.7, Priority.DEFAULT: 0.2, Priority.BATCH: 0.1}
LONGEST_WAIT_S = {Priority.INTERACTIVE: 10.0, Priority.DEFAULT: 30.0, Priority.BATCH: 120.0}
STANDING_AFTER_S = 1.0
STANDING_CLASS, STANDING_TENANT = 0.1, 0.05  # of the longest wait
FEW = 4  # requests: where places are few and answers long, some may always wait
CAUTION = 0.75  # of a time that may be waited, what an estimate may say


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Of the queue in front of one model, at one gateway."""

    num_requests: int = 1024
    num_tokens: int = 2**20
    longest_wait_s: Mapping[Priority, float] = field(default_factory=lambda: LONGEST_WAIT_S)


class AdmissionQueue:
    """The waiting requests of one model."""

    def __init__(self, bounds: QueueBounds) -> None:
        self.bounds = bounds
        self.lanes = {priority: Lane() for priority in Priority}
        self._earned = dict.fromkeys(Priority, 0.0)  # tokens that a class may start before more urgent ones
        self._since_s = dict.fromkeys(Priority, 0.0)  # when the class began to wait …
        self._until_s = dict.fromkeys(Priority, -math.inf)  # … and when its lane was last empty
        self._rates = {priority: ServiceRate() for priority in Priority}  # of each class while it waits
        self._rate = ServiceRate()

    def __len__(self) -> int:
        return sum(map(len, self.lanes.values()))

    @property
    def num_tokens(self) -> int:
        return sum(lane.num_tokens for lane in self.lanes.values())

    @property
    def backlog_s(self) -> float:
        """Until all that waits has started, at the rate at which it does; 0 where that is not known yet."""
        rate = self._rate.tokens_per_s
        return 0.0 if rate is None else self.num_tokens / rate

    def join(self, ticket: Ticket, now_s: float, draw: float) -> list[Ticket]:
        """Let it wait. Returns who was displaced for it. Raises Busy, DeadlineExceeded."""
        left_s = ticket.deadline_s - now_s
        if left_s <= 0:
            raise expired()
        if self.wait_s(ticket) > min(CAUTION * left_s, self._longest_s(ticket, now_s)):
            raise self.busy(ticket, WAIT_TOO_LONG, draw)
        ticket.weight = 1 / self.bounds.num_requests + ticket.num_tokens / self.bounds.num_tokens
        displaced = self._make_room(ticket)
        if displaced is None:
            raise self.busy(ticket, QUEUE_FULL, draw)
        for victim in displaced:
            self._note_empty(victim.priority, now_s)
        lane = self.lanes[ticket.priority]
        if not lane and now_s - self._until_s[ticket.priority] > STANDING_AFTER_S:
            self._since_s[ticket.priority] = now_s
        lane.join(ticket)
        self._rates[ticket.priority].begin(now_s)
        self._rate.begin(now_s)
        return displaced

    def head(self) -> Ticket | None:
        """Who comes next; None where nobody waits."""
        heads = [head for lane in self.lanes.values() if (head := lane.head()) is not None]
        earned = (head for head in reversed(heads) if self._earned[head.priority] >= head.num_tokens)
        return next(earned, heads[0] if heads else None)

    def take(self, ticket: Ticket, now_s: float) -> None:
        """It starts."""
        own = ticket.priority
        self.lanes[own].take(ticket)
        for priority, lane in self.lanes.items():
            earned = self._earned[priority] + SHARES[priority] * ticket.num_tokens
            if priority is own:
                earned = max(earned - ticket.num_tokens, 0.0)
            self._earned[priority] = earned if lane else 0.0
        if ticket.arrived_s < now_s:
            self._rates[own].started(ticket.num_tokens, now_s)
            self._rate.started(ticket.num_tokens, now_s)
        self._note_empty(own, now_s)

    def leave(self, ticket: Ticket, now_s: float) -> None:
        """It waits no more: its client left, or its time is over."""
        self._remove(ticket)
        self._note_empty(ticket.priority, now_s)

    def settle(self, ticket: Ticket, num_tokens: int) -> None:
        """One that was taken has ended; it really used so many tokens."""
        self.lanes[ticket.priority].settle(ticket, num_tokens)

    def wait_s(self, ticket: Ticket) -> float:
        """How long one like this would wait if it came now; 0 where that is not known yet.

        For what its class serves before it, as fast as its class was served of late while it waited, and no
        slower than its share. Where more urgent ones wait it has to earn its own turn as well.
        """
        rate = self._rate.tokens_per_s
        if rate is None:
            return 0.0
        own = ticket.priority
        tokens = self.lanes[own].tokens_ahead(ticket.tenant)
        if any(lane for priority, lane in self.lanes.items() if priority < own):
            tokens += ticket.num_tokens
        return tokens / max(self._rates[own].tokens_per_s or rate, SHARES[own] * rate)

    def busy(self, ticket: Ticket, reason: str, draw: float) -> Busy:
        """The error for one that is turned away. `draw` in [0, 1) spreads those who come back."""
        error = Busy("The server has more requests than it can take at the moment; try again shortly.")
        error.dropped_reason = reason
        error.retry_after_s = min(max(self.wait_s(ticket), LEAST_RETRY_S) * (1 + draw), MOST_RETRY_S)
        return error

    def _longest_s(self, ticket: Ticket, now_s: float) -> float:
        """The longest wait that is worth it now."""
        lane, share = self.lanes[ticket.priority], CAUTION
        stands_from_s = now_s - STANDING_AFTER_S
        if len(lane) >= FEW and self._since_s[ticket.priority] < stands_from_s:
            is_its_own = lane.waits_since_s(ticket.tenant, now_s) < stands_from_s
            share = STANDING_TENANT if is_its_own else STANDING_CLASS
        return share * self.bounds.longest_wait_s[ticket.priority]

    def _make_room(self, ticket: Ticket) -> list[Ticket] | None:
        """Whom to displace, displaced already; None, and nobody is, where that is not enough."""
        victims: list[Ticket] = []
        while self._overflows(ticket):
            victim = self._victim(ticket)
            if victim is None:
                for other in reversed(victims):  # newest first they went: so they stand as before
                    self.lanes[other.priority].join(other)
                return None
            self._remove(victim)
            victims.append(victim)
        return victims

    def _overflows(self, ticket: Ticket) -> bool:
        num_tokens = self.num_tokens + ticket.num_tokens
        too_many = num_tokens > self.bounds.num_tokens and len(self) > 0  # alone it may be as long as it is
        return len(self) >= self.bounds.num_requests or too_many

    def _victim(self, ticket: Ticket) -> Ticket | None:
        own = ticket.priority
        is_below = self._over_its_share(own) < 0
        for priority in reversed(Priority):
            lane = self.lanes[priority]
            if priority is own:
                heaviest = lane.heaviest()
                if heaviest is not None and heaviest.tenant != ticket.tenant:
                    weight = lane.weight_of(ticket.tenant) + ticket.weight
                    if lane.weight_of(heaviest.tenant) > weight:
                        return heaviest
            elif self._over_its_share(priority) > 0 and (priority > own or is_below):
                return lane.heaviest()
        return None

    def _over_its_share(self, priority: Priority) -> float:
        """How much more of what the queue holds is of this class than its due; below 0: less."""
        total = sum(lane.weight for lane in self.lanes.values())
        return self.lanes[priority].weight - SHARES[priority] * total

    def _note_empty(self, priority: Priority, now_s: float) -> None:
        if not self.lanes[priority]:
            self._until_s[priority] = now_s
            self._rates[priority].end(now_s)
        if not len(self):
            self._rate.end(now_s)

    def _remove(self, ticket: Ticket) -> None:
        lane = self.lanes[ticket.priority]
        lane.leave(ticket)
        if not lane:
            self._earned[ticket.priority] = 0.0


def expired() -> DeadlineExceeded:
    """The error for one whose time ran out while it waited."""
    error = DeadlineExceeded("The request's time ran out before a place was free for it.")
    error.dropped_reason = EXPIRED
    return error
