"""The policies to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from antiphon.router.policy import NO_OVERLAP, Ask, Overlap, Policy, Reason, ReplicaState, Route
from antiphon.router.rivals import LeastLoaded, PolicyName, PowerOfTwo, RoundRobin, Session, policy_named

ASK = Ask(1000, 16)


def pick(policy: Policy, states: Sequence[ReplicaState], draw: float = 0.0, ask: Ask = ASK) -> Route:
    route = policy.choose(ask, states, [NO_OVERLAP] * len(states), draw)
    assert route is not None
    return route


def idle(number: int) -> list[ReplicaState]:
    return [ReplicaState(replica) for replica in range(number)]


def shares(policy: Policy, states: Sequence[ReplicaState], num_draws: int = 1200) -> Counter[int]:
    """Who is taken how often over even draws."""
    return Counter(pick(policy, states, n / num_draws).replica for n in range(num_draws))


def sessions(policy: Policy, states: Sequence[ReplicaState], number: int) -> dict[bytes, int]:
    keys = [b"session %d" % n for n in range(number)]
    return {key: pick(policy, states, ask=Ask(1000, 16, session=key)).replica for key in keys}


def test_round_robin_takes_turns() -> None:
    """Every replica once before any is taken again, whatever their load."""
    policy = RoundRobin()
    fleet = [ReplicaState(replica, running=50 * replica) for replica in range(4)]
    for _ in range(3):
        assert {pick(policy, fleet, 0.5).replica for _ in range(4)} == {0, 1, 2, 3}


def test_round_robin_by_weight() -> None:
    """Two requests in three to the one of twice the weight, not in blocks."""
    policy = RoundRobin()
    fleet = [ReplicaState(0, weight=2.0), ReplicaState(1)]
    turns = [pick(policy, fleet).replica for _ in range(30)]
    assert Counter(turns) == {0: 20, 1: 10}
    assert all(1 in turns[n : n + 3] for n in range(27))


def test_round_robin_forgets_replicas_that_left() -> None:
    """What it remembers is bounded by who is there; a new one is not owed the past."""
    policy = RoundRobin()
    for replica in range(100):
        pick(policy, [ReplicaState(replica), ReplicaState(replica + 1)])
    counts = Counter(pick(policy, [ReplicaState(100), ReplicaState(500)]).replica for _ in range(10))
    assert abs(counts[500] - 5) <= 1


def test_least_loaded_counts_what_was_sent() -> None:
    """Row 33: sequences sent since the last report are load, and so are open ones."""
    fleet = [ReplicaState(0, dispatched=2), ReplicaState(1, running=1), ReplicaState(2, own=3)]
    assert shares(LeastLoaded(), fleet) == {1: 1200}


def test_least_loaded_by_weight() -> None:
    """Four sequences on a replica of weight 4 are less than two on one of weight 1."""
    fleet = [ReplicaState(0, running=4, weight=4.0), ReplicaState(1, running=2)]
    assert pick(LeastLoaded(), fleet).replica == 0


@pytest.mark.parametrize("policy", [LeastLoaded(), PowerOfTwo()])
def test_ties_are_even(policy: Policy) -> None:
    """Row 32: idle replicas are taken equally often."""
    assert sorted(shares(policy, idle(4)).values()) == pytest.approx([300] * 4, abs=2)


def test_power_of_two_never_takes_the_busiest() -> None:
    """Of two different ones the less loaded: the busiest always loses, the idlest wins whenever drawn."""
    fleet = [ReplicaState(replica, running=replica) for replica in range(4)]
    taken = shares(PowerOfTwo(), fleet)
    assert taken[3] == 0
    assert [taken[n] for n in range(3)] == pytest.approx([600, 400, 200], abs=2)


def test_a_session_stays() -> None:
    """The same replica for every draw and load below the bound, and sessions spread over all."""
    fleet = idle(5)
    first = sessions(Session(), fleet, 200)
    assert first == sessions(Session(), list(reversed(fleet)), 200)
    assert set(first.values()) == {0, 1, 2, 3, 4}
    assert max(Counter(first.values()).values()) < 80


def test_only_the_sessions_of_a_lost_replica_move() -> None:
    """Rendezvous: the others find theirs as before."""
    before = sessions(Session(), idle(5), 200)
    after = sessions(Session(), [s for s in idle(5) if s.replica != 2], 200)
    assert all(after[key] == replica for key, replica in before.items() if replica != 2)


def test_sessions_by_weight() -> None:
    """Three times the weight, about three times the sessions."""
    counts = Counter(sessions(Session(), [ReplicaState(0, weight=3.0), ReplicaState(1)], 800).values())
    assert counts[0] == pytest.approx(600, rel=0.1)


def test_a_busy_replica_sends_sessions_on() -> None:
    """Above 1.25 of the mean and four above it the session goes to its next one, always the same."""
    home = pick(Session(), idle(4), ask=Ask(1000, 16, session=b"s")).replica
    busy = [ReplicaState(r, running=40 if r == home else 8) for r in range(4)]
    moved = pick(Session(), busy, ask=Ask(1000, 16, session=b"s"))
    assert moved.replica != home
    assert moved.reason is Reason.SESSION_FULL
    assert pick(Session(), busy, 0.9, Ask(1000, 16, session=b"s")).replica == moved.replica


def test_little_load_is_no_reason_to_leave() -> None:
    """Three sequences against none are far above the mean and still nothing."""
    home = pick(Session(), idle(4), ask=Ask(1000, 16, session=b"s")).replica
    fleet = [ReplicaState(r, running=3 if r == home else 0) for r in range(4)]
    route = pick(Session(), fleet, ask=Ask(1000, 16, session=b"s"))
    assert (route.replica, route.reason) == (home, Reason.SESSION)


def test_without_a_session_the_least_loaded() -> None:
    """Nothing to hold on to."""
    fleet = [ReplicaState(0, running=1), ReplicaState(1)]
    route = pick(Session(), fleet)
    assert (route.replica, route.reason) == (1, Reason.LEAST_LOADED)


@pytest.mark.parametrize("name", list(PolicyName))
def test_dispatched_tokens_are_told_on_every_path(name: PolicyName) -> None:
    """Row 29: whichever policy chose, the route says how much work was sent."""
    fleet = idle(2)
    route = policy_named(name).choose(Ask(1600, 16, session=b"s"), fleet, [Overlap(60), Overlap(60)], 0.0)
    assert route is not None
    assert route.num_uncached == 640
