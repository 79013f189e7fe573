"""AdmissionQueue: classes, bounds, early refusal, honest Retry-After."""

from __future__ import annotations

import pytest

from antiphon.core.errors import Busy, DeadlineExceeded
from antiphon.core.generation import Priority
from antiphon.router.admission import (
    DISPLACED,
    EXPIRED,
    QUEUE_FULL,
    WAIT_TOO_LONG,
    AdmissionQueue,
    QueueBounds,
)
from antiphon.router.lane import Ticket

URGENT, USUAL, BATCH = Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH


def ticket(tenant: str = "a", priority: Priority = URGENT, num_tokens: int = 100, **fields: float) -> Ticket:
    values = {"deadline_s": 1e9, "arrived_s": 0.0} | fields
    return Ticket(tenant, priority, num_tokens, values["deadline_s"], values["arrived_s"])


def queue_of(num_requests: int = 1000, num_tokens: int = 10**9) -> AdmissionQueue:
    return AdmissionQueue(QueueBounds(num_requests, num_tokens))


def fill(queue: AdmissionQueue, count: int, tenant: str = "a", priority: Priority = URGENT) -> list[Ticket]:
    tickets = [ticket(tenant, priority) for _ in range(count)]
    for made in tickets:
        queue.join(made, 0.0, 0.0)
    return tickets


def fill_at(queue: AdmissionQueue, count: int, now_s: float) -> None:
    for _ in range(count):
        queue.join(ticket(arrived_s=now_s), now_s, 0.0)


def serve(queue: AdmissionQueue, now_s: float = 1.0) -> Ticket:
    head = queue.head()
    assert head is not None
    queue.take(head, now_s)
    return head


def busy_queue(priority: Priority = URGENT, tokens_per_s: float = 1000.0) -> AdmissionQueue:
    """One whose rate is known; nobody waits in it any more."""
    queue = queue_of()
    for _ in range(11):
        queue.join(ticket("z", priority), 0.0, 0.0)
    for step in range(11):
        serve(queue, 100 * (step + 1) / tokens_per_s)
    return queue


def refusal(queue: AdmissionQueue, asked: Ticket, now_s: float = 0.0, draw: float = 0.0) -> Busy:
    with pytest.raises(Busy) as caught:
        queue.join(asked, now_s, draw)
    return caught.value


def test_urgent_classes_come_first() -> None:
    """Whatever came before."""
    queue = queue_of()
    fill(queue, 1, priority=BATCH)
    fill(queue, 1, priority=USUAL)
    fill(queue, 1, priority=URGENT)
    assert [serve(queue).priority for _ in range(3)] == [URGENT, USUAL, BATCH]


def test_less_urgent_classes_get_their_share() -> None:
    """Behind an endless row of urgent requests, a tenth goes to batch and a fifth to default."""
    queue = queue_of()
    for priority in Priority:
        fill(queue, 200, priority=priority)
    classes = [serve(queue).priority for _ in range(100)]
    assert classes.count(USUAL) in (19, 20)
    assert classes.count(BATCH) in (9, 10)


def test_a_class_that_does_not_wait_earns_nothing() -> None:
    """Batch that comes after a thousand urgent requests does not go first."""
    queue = queue_of(10_000)
    fill(queue, 1000, priority=URGENT)
    for _ in range(900):
        serve(queue)
    fill(queue, 1, priority=BATCH)
    assert serve(queue).priority is URGENT


def test_a_tenant_alone_may_fill_the_queue_and_no_more() -> None:
    """The next one is told when to come again; nobody's place is lost."""
    queue = queue_of(num_requests=5)
    fill(queue, 5)
    error = refusal(queue, ticket())
    assert (error.status, error.dropped_reason, error.retry_after_s) == (429, QUEUE_FULL, 1.0)
    assert len(queue) == 5


def test_tokens_bound_the_queue_too() -> None:
    """Long prompts fill it with few requests; one alone always fits."""
    queue = queue_of(num_tokens=1000)
    queue.join(ticket(num_tokens=5000), 0.0, 0.0)
    assert refusal(queue, ticket(num_tokens=1)).dropped_reason == QUEUE_FULL


def test_a_light_tenant_displaces_the_newest_of_the_heaviest() -> None:
    """A flood does not keep others out of a full queue."""
    queue = queue_of(num_requests=5)
    flood = fill(queue, 5, "heavy")
    assert queue.join(ticket("light"), 0.0, 0.0) == [flood[-1]]
    assert queue.join(ticket("light"), 0.0, 0.0) == [flood[-2]]
    assert refusal(queue, ticket("light")).dropped_reason == QUEUE_FULL, "then they hold as much"


def test_an_urgent_class_displaces_one_above_its_share() -> None:
    """A queue full of batch opens for people."""
    queue = queue_of(num_requests=10)
    batch = fill(queue, 10, priority=BATCH)
    displaced = [queue.join(ticket("b"), 0.0, 0.0) for _ in range(9)]
    assert displaced == [[late] for late in reversed(batch[1:])]
    queue.join(ticket("c"), 0.0, 0.0)
    assert queue.lanes[BATCH].num_requests == 1, "batch keeps its tenth"


def test_a_class_below_its_share_finds_room_among_more_urgent_ones() -> None:
    """A queue full of people's requests keeps a tenth for batch."""
    queue = queue_of(num_requests=30)
    fill(queue, 30, priority=URGENT)
    for _ in range(3):
        assert [late.priority for late in queue.join(ticket("b", BATCH), 0.0, 0.0)] == [URGENT]
    queue.lanes[BATCH].join(ticket("b", BATCH))
    assert refusal(queue, ticket("b", BATCH)).dropped_reason == QUEUE_FULL, "it has its tenth"


def test_who_does_not_fit_displaces_nobody() -> None:
    """Where all that could be displaced is not enough, the queue stays as it was, order included."""
    queue = queue_of(num_tokens=1000)
    fill(queue, 6, "heavy")
    fill(queue, 4, "other")
    before = [lane.num_requests for lane in queue.lanes.values()]
    assert refusal(queue, ticket("light", num_tokens=700)).dropped_reason == QUEUE_FULL
    assert [lane.num_requests for lane in queue.lanes.values()] == before
    assert [serve(queue).tenant for _ in range(4)] == ["heavy", "other", "heavy", "other"]


def test_a_wait_that_would_be_too_long_is_not_begun() -> None:
    """At 1,000 tokens a second, 7.6 s of waiting are over three quarters of 10 s."""
    queue = busy_queue()
    fill(queue, 74)
    queue.join(ticket(num_tokens=200), 0.0, 0.0)
    error = refusal(queue, ticket())
    assert error.dropped_reason == WAIT_TOO_LONG
    assert error.retry_after_s == pytest.approx(7.6, rel=0.02)
    queue.join(ticket("b"), 0.0, 0.0)  # whose turn comes at once
    queue.join(ticket("a", USUAL), 0.0, 0.0)  # which may wait longer


def test_a_deadline_that_cannot_be_met_is_refused_when_it_comes() -> None:
    """A client with 2 s is not let into a wait of 4."""
    queue = busy_queue()
    fill(queue, 40)
    assert refusal(queue, ticket(deadline_s=2.0)).dropped_reason == WAIT_TOO_LONG
    with pytest.raises(DeadlineExceeded) as caught:
        queue.join(ticket(deadline_s=0.0), 0.0, 0.0)
    assert caught.value.dropped_reason == EXPIRED


def test_a_standing_queue_is_kept_short() -> None:
    """Two seconds of waiting are fine for a burst, not once the class has waited for over a second."""
    queue = busy_queue()
    fill(queue, 20)
    queue.join(ticket(), 0.9, 0.0)
    assert refusal(queue, ticket(), now_s=1.1).dropped_reason == WAIT_TOO_LONG
    while len(queue):
        serve(queue, 3.0)
    queue.join(ticket(arrived_s=3.0), 3.0, 0.0)


def test_a_queue_that_is_empty_for_a_moment_still_stands() -> None:
    """Else each moment without a waiter would let in another second's flood."""
    queue = busy_queue()
    fill(queue, 5)
    while len(queue):
        serve(queue, 2.0)
    with pytest.raises(Busy):
        fill_at(queue, 20, 2.5)
    assert 4 <= len(queue) <= 10


def test_retry_after_is_spread_and_bounded() -> None:
    """Clients that were refused together do not come back together, nor in an hour."""
    queue = busy_queue(BATCH)
    for made in (ticket("a", BATCH) for _ in range(200)):
        queue.join(made, 0.0, 0.0)
    asked = ticket("a", BATCH)
    assert queue.busy(asked, DISPLACED, 0.0).retry_after_s == pytest.approx(20, rel=0.2)
    assert queue.busy(asked, DISPLACED, 0.5).retry_after_s == pytest.approx(30, rel=0.2)
    assert queue.busy(ticket("a", BATCH, 10**6), DISPLACED, 0.99).retry_after_s <= 60
    assert queue_of().busy(asked, DISPLACED, 0.0).retry_after_s == 1.0, "nothing is known yet"


def test_who_leaves_is_not_served() -> None:
    """A client that is gone costs nobody a turn."""
    queue = queue_of()
    first, second = fill(queue, 2)
    queue.leave(first, 0.0)
    assert serve(queue) is second
    assert queue.head() is None


def test_backlog_is_what_waits_by_the_rate_at_which_it_starts() -> None:
    """What autoscalers go by: nothing while nobody waits or the rate is not known."""
    young = queue_of()
    fill(young, 3)
    assert young.backlog_s == 0.0
    queue = busy_queue(tokens_per_s=1000.0)
    assert queue.backlog_s == 0.0
    queue.join(ticket(num_tokens=500), 2.0, 0.0)
    assert queue.backlog_s == pytest.approx(0.5, rel=0.2)
