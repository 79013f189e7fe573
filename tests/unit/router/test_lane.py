"""Lane: whose turn it is within a class."""

from __future__ import annotations

from antiphon.core.generation import Priority
from antiphon.router import lane as lane_module
from antiphon.router.lane import Lane, Ticket


def ticket(tenant: str, num_tokens: int = 100, weight: float = 0.1) -> Ticket:
    return Ticket(tenant, Priority.DEFAULT, num_tokens, 1e9, 0.0, weight=weight)


def served(lane: Lane, count: int) -> str:
    """Tenants of the next so many, in order."""
    names = []
    for _ in range(count):
        head = lane.head()
        assert head is not None
        lane.take(head)
        names.append(head.tenant)
    return "".join(names)


def fill(lane: Lane, tenants: str, num_tokens: int = 100) -> list[Ticket]:
    tickets = [ticket(tenant, num_tokens) for tenant in tenants]
    for made in tickets:
        lane.join(made)
    return tickets


def test_tenants_take_turns_however_many_requests_they_bring() -> None:
    """One with six requests and one with two are served by turns until the latter has none."""
    lane = Lane()
    fill(lane, "aaaaaabb")
    assert served(lane, 8) == "ababaaaa"


def test_turns_go_by_tokens() -> None:
    """Who asks for three times as much at once has a third of the turns."""
    lane = Lane()
    fill(lane, "aaa", 300)
    fill(lane, "bbbbbb", 100)
    assert served(lane, 8).count("b") == 6


def test_requests_of_one_tenant_keep_their_order() -> None:
    """First come, first served within a tenant; one that leaves is passed over."""
    lane = Lane()
    first, second, third = fill(lane, "aaa")
    lane.leave(second)
    assert lane.head() is first
    lane.take(first)
    assert lane.head() is third


def test_nobody_saves_up_turns_while_away() -> None:
    """A tenant that comes late starts level with those that wait, not ahead by all they had."""
    lane = Lane()
    fill(lane, "a" * 20)
    served(lane, 10)
    fill(lane, "b" * 10)
    assert served(lane, 8).count("b") in (4, 5)


def test_a_queue_that_was_empty_does_not_forgive_what_was_served_last() -> None:
    """After a lone tenant's long use a newcomer is level with it, and both take turns."""
    lane = Lane()
    for _ in range(10):
        fill(lane, "a")
        served(lane, 1)
    fill(lane, "bbbbaaaa")
    assert served(lane, 6).count("b") == 3


def test_what_was_really_used_counts() -> None:
    """A tenant whose answers were shorter than expected gets the difference back."""
    lane = Lane()
    taken = fill(lane, "a")[0]
    fill(lane, "aaaabbbb")
    lane.take(taken)
    served(lane, 1)
    lane.settle(taken, 0)
    before = served(lane, 3)
    assert before.count("a") == 2, before


def test_settling_for_a_tenant_that_was_forgotten_is_fine() -> None:
    """Its request may outlive what is remembered of it."""
    lane = Lane()
    lane.settle(ticket("gone"), 5)
    assert lane.head() is None


def test_idle_tenants_are_forgotten_past_a_bound() -> None:
    """Names come from clients' keys: their number must not grow memory."""
    lane = Lane()
    for number in range(lane_module.MAX_IDLE + 50):
        lane.join(ticket(f"t{number}"))
        served(lane, 1)
    assert len(lane._idle) == lane_module.MAX_IDLE


def test_the_heaviest_is_who_fills_most_and_its_newest_request_is_named() -> None:
    """By weight, not by number of requests."""
    lane = Lane()
    fill(lane, "bbb")
    big = ticket("a", 900, weight=0.9)
    lane.join(big)
    assert lane.heaviest() is big
    lane.leave(big)
    newest = fill(lane, "b")[0]
    assert lane.heaviest() is newest


def test_tokens_ahead_are_few_for_a_light_tenant_and_all_for_a_heavy_one() -> None:
    """A newcomer waits for one request of another; who has most waiting waits for everything."""
    lane = Lane()
    fill(lane, "a" * 50)
    assert lane.tokens_ahead("b") == 100
    fill(lane, "b")
    assert lane.tokens_ahead("b") == 300
    assert lane.tokens_ahead("a") == 5100


def test_tokens_ahead_are_all_there_are_where_many_tenants_wait_with_one_request_each() -> None:
    """A newcomer comes behind all of them."""
    lane = Lane()
    fill(lane, "abcdefgh")
    assert lane.tokens_ahead("z") == 800


def test_a_tenant_waits_since_its_queue_was_last_empty() -> None:
    """One that never waits long is not one whose requests stand."""
    lane = Lane()
    lane.join(Ticket("a", Priority.DEFAULT, 1, 1e9, 5.0))
    lane.join(Ticket("a", Priority.DEFAULT, 1, 1e9, 7.0))
    assert (lane.waits_since_s("a", 9.0), lane.waits_since_s("b", 9.0)) == (5.0, 9.0)
    served(lane, 2)
    lane.join(Ticket("a", Priority.DEFAULT, 1, 1e9, 8.0))
    assert lane.waits_since_s("a", 9.0) == 8.0
