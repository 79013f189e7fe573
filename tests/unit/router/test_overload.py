"""A queue under twice what its server can do, in virtual time: waits, shares and what is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from antiphon.core.errors import Busy
from antiphon.core.generation import Priority
from antiphon.router.admission import WAIT_TOO_LONG, AdmissionQueue, QueueBounds
from antiphon.router.lane import Ticket

URGENT, USUAL, BATCH = Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH
TOKENS_PER_S = 10_000.0
MOST_TOKENS = 1000
SECONDS = 120.0
WARM_S = 20.0


@dataclass
class Seen:
    """What became of the requests that came after the first seconds."""

    waits_s: dict[tuple[str, Priority], list[float]] = field(default_factory=dict)
    tokens: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))
    refused: dict[str, int] = field(default_factory=dict)
    idle_s: float = 0.0

    def worst_s(self, tenant: str, priority: Priority) -> float:
        """Of a hundred waits the longest but one."""
        waits_s = sorted(self.waits_s[tenant, priority])
        return waits_s[len(waits_s) * 99 // 100]


def arrivals(shares: dict[tuple[str, Priority], float], seed: int) -> list[Ticket]:
    """Requests of mixed sizes; `shares` of what can be served a second."""
    draws = random.Random(seed)
    found = []
    for (tenant, priority), share in shares.items():
        now_s = 0.0
        while now_s < SECONDS:
            now_s += draws.expovariate(share * TOKENS_PER_S / (MOST_TOKENS / 2))
            found.append(Ticket(tenant, priority, draws.randint(1, MOST_TOKENS), now_s + 600, now_s))
    return sorted(found, key=lambda ticket: ticket.arrived_s)


def live(shares: dict[tuple[str, Priority], float], seed: int = 1) -> Seen:
    """Serve them one after the other, at the server's speed."""
    queue, seen = AdmissionQueue(QueueBounds()), Seen()
    free_s = 0.0
    for ticket in arrivals(shares, seed):
        while (head := queue.head()) is not None and free_s <= ticket.arrived_s:
            queue.take(head, free_s)
            if head.arrived_s > WARM_S:
                seen.waits_s.setdefault((head.tenant, head.priority), []).append(free_s - head.arrived_s)
                seen.tokens[head.priority] += head.num_tokens
            free_s += head.num_tokens / TOKENS_PER_S
        if free_s < ticket.arrived_s:
            seen.idle_s += (ticket.arrived_s - free_s) * (ticket.arrived_s > WARM_S)
            free_s = ticket.arrived_s
        try:
            queue.join(ticket, ticket.arrived_s, 0.5)
        except Busy as error:
            reason = error.dropped_reason or ""
            seen.refused[reason] = seen.refused.get(reason, 0) + 1
    return seen


def test_a_standing_overload_keeps_waits_short_and_the_server_busy() -> None:
    """Half of what comes is refused at once; who is let in waits half a second, and no second is lost."""
    seen = live({("a", URGENT): 1.0, ("b", URGENT): 1.0})
    assert seen.worst_s("a", URGENT) < 1.0
    assert seen.idle_s < 0.01 * SECONDS
    assert seen.refused.keys() == {WAIT_TOO_LONG}


def test_below_capacity_nobody_is_refused() -> None:
    """Bursts wait, and are served."""
    seen = live({("a", URGENT): 0.5, ("b", USUAL): 0.3})
    assert not seen.refused


def test_a_light_tenant_hardly_notices_a_flood() -> None:
    """It waits for what is being served and one more, at most; the flood is refused, not it."""
    seen = live({("heavy", URGENT): 2.0, ("light", URGENT): 0.05})
    assert seen.worst_s("light", URGENT) < 4 * MOST_TOKENS / TOKENS_PER_S
    assert len(seen.waits_s["light", URGENT]) > 0.85 * 0.05 * TOKENS_PER_S / (MOST_TOKENS / 2) * (
        SECONDS - WARM_S
    )


def test_less_urgent_classes_keep_their_shares_under_a_flood_of_urgent_ones() -> None:
    """A fifth and a tenth of the service, and waits in proportion to what their class may wait."""
    seen = live({("a", URGENT): 1.5, ("a", USUAL): 0.5, ("a", BATCH): 0.5})
    total = sum(seen.tokens.values())
    assert 0.18 < seen.tokens[USUAL] / total < 0.22
    assert 0.09 < seen.tokens[BATCH] / total < 0.11
    assert seen.worst_s("a", URGENT) < 1.0
    assert seen.worst_s("a", USUAL) < 3.0
    assert seen.worst_s("a", BATCH) < 12.0


def test_a_burst_is_carried_over() -> None:
    """Five seconds of work that come within a moment are all served: the queue empties again."""
    queue = AdmissionQueue(QueueBounds())
    for _ in range(10):
        queue.join(Ticket("a", URGENT, 1000, 1e9, 0.0), 0.0, 0.0)
    for number in range(1, 11):  # so that its speed is known
        head = queue.head()
        assert head is not None
        queue.take(head, number / 10)
    for number in range(50):
        queue.join(Ticket("a", URGENT, 1000, 1e9, 3.0), 3.0 + number / 100, 0.0)
    assert len(queue) == 50
