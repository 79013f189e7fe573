"""The index that yields few replicas of many."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from antiphon.core.generation import WorkerRates
from antiphon.router.candidates import NUM_FEW, NUM_HOLDERS, NUM_LEAST, NUM_RANDOM, Candidates
from antiphon.router.cost import LeastCost
from antiphon.router.policy import NO_OVERLAP, Ask, Overlap, ReplicaState

RATES = WorkerRates(10_000.0, 0.02, 0.001, 100.0)


def filled(number: int, chance: Random, *, idle: range = range(0)) -> Candidates:
    """Replicas with work, but for the idle ones."""
    index = Candidates(chance.random)
    for replica in range(number):
        tokens = 0 if replica in idle else chance.randint(5000, 100_000)
        index.update(ReplicaState(replica, waiting_tokens=tokens, rates=RATES))
    return index


def names(states: list[ReplicaState]) -> set[int]:
    return {state.replica for state in states}


def test_a_small_fleet_is_looked_at_whole() -> None:
    """Up to the bound all are candidates, less those to avoid."""
    index = filled(NUM_FEW, Random(1))
    assert names(index.few([])) == set(range(NUM_FEW))
    assert names(index.few([], avoid={3, 5})) == set(range(NUM_FEW)) - {3, 5}


def test_of_thousands_few_are_yielded() -> None:
    """Holders, the idle ones, and some others; never more than the bound, none twice."""
    index = filled(3000, Random(1), idle=range(100, 104))
    few = index.few([7, 9, 7, 5000])
    assert len(few) == len(names(few)) <= NUM_FEW
    assert names(few) >= {7, 9, 100, 101, 102, 103}


def test_the_best_holders_come_first() -> None:
    """Of a thousand holders of a system prompt only the first few are looked at."""
    index = filled(3000, Random(1), idle=range(2900, 3000))
    few = names(index.few(range(1000)))
    assert few >= set(range(NUM_HOLDERS))
    assert len(few) <= NUM_FEW


def test_none_of_those_to_avoid() -> None:
    """Neither as holder nor as idle nor by lot."""
    index = filled(100, Random(1), idle=range(0, 50))
    for _ in range(50):
        assert not names(index.few(range(20), avoid=range(50))) & set(range(50))


def test_idle_replicas_take_turns() -> None:
    """Two gateways that see the same hundred idle replicas do not both send to the same few."""
    index = filled(1000, Random(1), idle=range(100))
    seen: set[int] = set()
    for _ in range(200):
        seen |= names(index.few([])) & set(range(100))
    assert seen == set(range(100))


def test_everybody_is_looked_at_at_times() -> None:
    """By lot even the busiest: one that reports nonsense is not left out for ever."""
    index = filled(60, Random(1), idle=range(20))
    seen: set[int] = set()
    for _ in range(300):
        seen |= names(index.few([]))
    assert seen == set(range(60))


def test_work_that_was_sent_moves_a_replica_back() -> None:
    """Row 33 at any size: a burst on reports that stand still goes to ever new replicas."""
    index = filled(500, Random(1), idle=range(400))
    policy, taken = LeastCost(), []
    for number in range(400):
        few = index.few([])
        route = policy.choose(Ask(4000, 16), few, [NO_OVERLAP] * len(few), number / 400)
        assert route is not None
        taken.append(route.replica)
        index.update(ReplicaState(route.replica, dispatched=1, dispatched_tokens=4000, rates=RATES))
    assert sorted(taken) == list(range(400))


def test_few_are_about_as_good_as_all() -> None:
    """The route among few costs hardly more than the best among all, over many fleets and holders."""
    chance, policy = Random(2), LeastCost()
    for _ in range(40):
        states = [ReplicaState(r, waiting_tokens=chance.randint(0, 40_000), rates=RATES) for r in range(400)]
        index = Candidates(chance.random)
        for state in states:
            index.update(state)
        holders = {chance.randrange(400): Overlap(chance.randint(100, 1000)) for _ in range(8)}
        best_first = sorted(holders, key=lambda r: -holders[r].local_blocks)
        ask = Ask(16_000, 16, 200)
        few, costs = index.few(best_first), []
        for some in (few, states):
            route = policy.choose(ask, some, [holders.get(s.replica, NO_OVERLAP) for s in some], 0.0)
            assert route is not None
            costs.append(min(seconds for _, seconds in route.costs))
        assert costs[0] <= 1.15 * costs[1]


class CandidatesMachine(RuleBasedStateMachine):
    """Updates and removals in any order against a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = Random(3)
        self.index = Candidates(self.chance.random)
        self.model: dict[int, ReplicaState] = {}

    @rule(replica=st.integers(0, 60), tokens=st.integers(0, 10**7), running=st.integers(0, 500))
    def update(self, replica: int, tokens: int, running: int) -> None:
        state = ReplicaState(replica, running=running, waiting_tokens=tokens)
        self.index.update(state)
        self.model[replica] = state

    @rule(replica=st.integers(0, 60))
    def remove(self, replica: int) -> None:
        self.index.remove(replica)
        self.model.pop(replica, None)

    @invariant()
    def yields_what_is_there(self) -> None:
        few = self.index.few([0, 30, 60])
        assert len(self.index) == len(self.model)
        assert len(few) == len(names(few)) == min(len(self.model), len(few))
        assert all(self.model[state.replica] == state for state in few)
        assert len(few) <= NUM_FEW
        assert len(few) >= min(len(self.model), NUM_LEAST + NUM_RANDOM)


CandidatesMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=80)
TestCandidatesMachine = CandidatesMachine.TestCase


@given(st.lists(st.integers(0, 10**6), min_size=NUM_FEW + 1, max_size=200), st.randoms())
def test_the_least_busy_is_nearly_always_among_them(tokens: list[int], chance: Random) -> None:
    """One of the few is within a bucket's width of the least, whatever the loads."""
    index = Candidates(chance.random)
    for replica, waiting in enumerate(tokens):
        index.update(ReplicaState(replica, waiting_tokens=waiting, rates=RATES))
    least = min(tokens)
    assert min(state.waiting_tokens for state in index.few([])) <= least + 0.15 * (least + 20_000)
