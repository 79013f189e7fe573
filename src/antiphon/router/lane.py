"""Requests of one class that wait, and whose turn it is: fair between tenants by tokens served. Pure.

The rule is the virtual token counter's: each tenant has a counter of tokens served, and the waiting tenant
with the smallest comes next, its requests in the order in which they came. A tenant that comes back
is lifted to the smallest counter of those that wait (or of the one that was served last), so that nobody
saves up turns while away. A request is charged when it is taken, by what is expected of it, and settled
by what it really used.

Invariants: while two tenants wait, their counters differ by no more than the largest request and what
was settled since; every change costs the logarithm of the number of tenants at most; tenants with nothing
waiting are remembered up to `MAX_IDLE`. Bounds and classes are admission.py's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from antiphon.core.generation import Priority
from antiphon.router.ranking import Ranking

MAX_IDLE = 4096


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that wants a place. `num_tokens`: prompt to be computed and answer, as expected."""

    tenant: str
    priority: Priority
    num_tokens: int
    deadline_s: float
    arrived_s: float
    num_prompt_tokens: int = 0
    num_sequences: int = 1
    weight: float = 0.0  # how much of the queue it fills; set by the queue


@dataclass(slots=True)
class _Tenant:
    counter: float = 0.0
    tickets: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    num_tokens: int = 0  # of its tickets
    weight: float = 0.0
    since_s: float = 0.0  # when it began to wait


class Lane:
    """The waiting requests of one class."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.weight = 0.0
        self._waiting: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, _Tenant] = OrderedDict()  # longest idle first
        self._by_counter = Ranking()
        self._by_weight = Ranking()  # negated: heaviest first
        self._last = _Tenant()  # served last

    def __len__(self) -> int:
        return self.num_requests

    def join(self, ticket: Ticket) -> None:
        """Let it wait behind its tenant's others."""
        tenant = self._waiting.get(ticket.tenant)
        if tenant is None:
            tenant = self._idle.pop(ticket.tenant, None) or _Tenant()
            tenant.counter = max(tenant.counter, self._least_counter())
            tenant.since_s = ticket.arrived_s
            self._waiting[ticket.tenant] = tenant
            self._by_counter.put(ticket.tenant, tenant.counter)
        tenant.tickets[ticket] = None
        self._count(tenant, ticket, 1)

    def head(self) -> Ticket | None:
        """Whose turn it is."""
        name = self._by_counter.least()
        return None if name is None else next(iter(self._waiting[name].tickets))

    def take(self, ticket: Ticket) -> None:
        """It starts: its tenant is charged."""
        tenant = self._last = self._waiting[ticket.tenant]
        tenant.counter += ticket.num_tokens
        self._by_counter.put(ticket.tenant, tenant.counter)
        self.leave(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It waits no more."""
        tenant = self._waiting[ticket.tenant]
        del tenant.tickets[ticket]
        self._count(tenant, ticket, -1)
        if not tenant.tickets:
            tenant.weight = 0.0
            self._by_counter.drop(ticket.tenant)
            self._by_weight.drop(ticket.tenant)
            self._idle[ticket.tenant] = self._waiting.pop(ticket.tenant)
            if len(self._idle) > MAX_IDLE:
                self._idle.popitem(last=False)

    def settle(self, ticket: Ticket, num_tokens: int) -> None:
        """One that was taken has ended; it really used so many tokens."""
        tenant = self._waiting.get(ticket.tenant) or self._idle.get(ticket.tenant)
        if tenant is not None:
            tenant.counter += num_tokens - ticket.num_tokens
            if tenant.tickets:
                self._by_counter.put(ticket.tenant, tenant.counter)

    def heaviest(self) -> Ticket | None:
        """The newest request of the tenant that fills most of the queue."""
        name = self._by_weight.least()
        return None if name is None else next(reversed(self._waiting[name].tickets))

    def weight_of(self, tenant: str) -> float:
        """How much of the queue this tenant's requests of this class fill."""
        return self._waiting[tenant].weight if tenant in self._waiting else 0.0

    def tokens_ahead(self, name: str) -> float:
        """Tokens that are served before one more request of this tenant, as far as can be seen.

        What waits of its own, and of every other tenant as much, what that is behind, and one request: rather
        too much, but never more than all that waits.
        """
        if not self.num_requests:
            return 0.0
        tenant = self._waiting.get(name) or self._idle.get(name) or _Tenant()
        num_others = len(self._waiting) - (name in self._waiting)
        behind = max(tenant.counter - self._least_counter(), 0.0) + self.num_tokens / self.num_requests
        return min(tenant.num_tokens + num_others * (tenant.num_tokens + behind), float(self.num_tokens))

    def waits_since_s(self, name: str, now_s: float) -> float:
        """Since when this tenant has had something waiting without a break."""
        return self._waiting[name].since_s if name in self._waiting else now_s

    def _least_counter(self) -> float:
        name = self._by_counter.least()
        return self._last.counter if name is None else self._waiting[name].counter

    def _count(self, tenant: _Tenant, ticket: Ticket, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * ticket.num_tokens
        self.weight = self.weight + sign * ticket.weight if self.num_requests else 0.0
        tenant.num_tokens += sign * ticket.num_tokens
        tenant.weight += sign * ticket.weight
        self._by_weight.put(ticket.tenant, -tenant.weight)
