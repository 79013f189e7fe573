"""Random lives of a queue: nobody is lost, bounds hold, service is fair between tenants and classes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.core.errors import Busy, DeadlineExceeded
from antiphon.core.generation import Priority
from antiphon.router.admission import SHARES, AdmissionQueue, QueueBounds
from antiphon.router.lane import Ticket

MOST_TOKENS = 400
BOUNDS = QueueBounds(num_requests=12, num_tokens=2000)
TENANTS = st.sampled_from("abcd")
CLASSES = st.sampled_from(Priority)
SIZES = st.integers(1, MOST_TOKENS)


class QueueMachine(RuleBasedStateMachine):
    """A model that knows who waits, and nothing of the order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(BOUNDS)
        self.now_s = 0.0
        self.waiting: dict[Ticket, None] = {}
        self.taken: list[Ticket] = []

    @rule(tenant=TENANTS, priority=CLASSES, size=SIZES, left_s=st.integers(-1, 60))
    def join(self, tenant: str, priority: Priority, size: int, left_s: int) -> None:
        ticket = Ticket(tenant, priority, size, self.now_s + left_s, self.now_s)
        before = [*self.waiting]
        try:
            displaced = self.queue.join(ticket, self.now_s, 0.5)
        except Busy as error:
            assert (error.dropped_reason or "").startswith("rejected-")
            assert error.retry_after_s is not None
            assert 1.0 <= error.retry_after_s <= 60.0
            return
        except DeadlineExceeded:
            assert left_s <= 0
            return
        assert left_s > 0
        assert all(victim in before for victim in displaced)
        for victim in displaced:
            del self.waiting[victim]
        self.waiting[ticket] = None

    @rule(eighths=st.integers(0, 24))
    def serve(self, eighths: int) -> None:
        self.now_s += eighths / 8
        ticket = self.queue.head()
        assert (ticket is None) == (not self.waiting)
        if ticket is None:
            return
        assert ticket in self.waiting
        same = [
            other
            for other in self.waiting
            if (other.tenant, other.priority) == (ticket.tenant, ticket.priority)
        ]
        assert ticket is same[0], "its tenant's oldest"
        self.queue.take(ticket, self.now_s)
        del self.waiting[ticket]
        self.taken.append(ticket)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([*self.waiting]))
        self.queue.leave(ticket, self.now_s)
        del self.waiting[ticket]

    @precondition(lambda self: self.taken)
    @rule(used=st.integers(0, 2 * MOST_TOKENS))
    def settle(self, used: int) -> None:
        self.queue.settle(self.taken.pop(), used)

    @invariant()
    def counts_agree_and_bounds_hold(self) -> None:
        assert len(self.queue) == len(self.waiting) <= BOUNDS.num_requests
        assert self.queue.num_tokens == sum(ticket.num_tokens for ticket in self.waiting)
        assert self.queue.num_tokens <= BOUNDS.num_tokens
        for priority, lane in self.queue.lanes.items():
            assert lane.num_requests == sum(ticket.priority is priority for ticket in self.waiting)
            assert 0 <= lane.weight <= 2 + 1e-6


QueueMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


def backlog(queue: AdmissionQueue, tenant: str, priority: Priority, sizes: list[int]) -> None:
    for size in sizes:
        queue.join(Ticket(tenant, priority, size, 1e9, 0.0), 0.0, 0.0)


def started(queue: AdmissionQueue, count: int) -> list[Ticket]:
    found = []
    for _ in range(count):
        ticket = queue.head()
        assert ticket is not None
        queue.take(ticket, 0.0)
        found.append(ticket)
    return found


BACKLOG = st.lists(SIZES, min_size=60, max_size=60)


@given(st.fixed_dictionaries({name: BACKLOG for name in "abc"}), st.integers(0, 40), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_two_tenants_that_wait_get_the_same(sizes: dict[str, list[int]], skipped: int, length: int) -> None:
    """Over any stretch in which both wait, their tokens differ by two of the largest requests at most."""
    queue = AdmissionQueue(QueueBounds())
    for tenant, mine in sizes.items():
        backlog(queue, tenant, Priority.DEFAULT, mine)
    started(queue, skipped)
    tokens = Counter(dict.fromkeys(sizes, 0))
    for ticket in started(queue, length):
        if not all(queue.lanes[Priority.DEFAULT].weight_of(tenant) for tenant in sizes):
            break
        tokens[ticket.tenant] += ticket.num_tokens
        assert max(tokens.values()) - min(tokens.values()) <= 2 * MOST_TOKENS


@given(BACKLOG, BACKLOG, BACKLOG, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_every_class_gets_its_share_while_it_waits(
    urgent: list[int], usual: list[int], batch: list[int], length: int
) -> None:
    """Less the largest request, and what the other one's earnings take in between; so nobody starves."""
    queue = AdmissionQueue(QueueBounds())
    for priority, sizes in zip(Priority, (urgent, usual, batch), strict=True):
        backlog(queue, "a", priority, sizes)
    tokens = Counter(dict.fromkeys(Priority, 0))
    for ticket in started(queue, length):
        tokens[ticket.priority] += ticket.num_tokens
        total = sum(tokens.values())
        for priority in (Priority.DEFAULT, Priority.BATCH):
            assert tokens[priority] >= SHARES[priority] * total - 2 * MOST_TOKENS


@given(BACKLOG, st.integers(0, 50), SIZES)
@settings(max_examples=60, deadline=None)
def test_a_light_tenant_waits_for_one_request_of_a_flood(sizes: list[int], before: int, size: int) -> None:
    """However much of another's waits: before its own request one more starts, or none."""
    queue = AdmissionQueue(QueueBounds())
    backlog(queue, "heavy", Priority.DEFAULT, sizes)
    started(queue, before)
    backlog(queue, "light", Priority.DEFAULT, [size])
    assert "light" in [ticket.tenant for ticket in started(queue, 2)]
