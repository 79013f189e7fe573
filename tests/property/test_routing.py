"""The routing policy against what must hold whatever workers report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import WorkerRates
from antiphon.router.cost import TIE_S, TIE_SHARE, Cost, LeastCost, cost, peer_rates
from antiphon.router.policy import Ask, Overlap, Reason, ReplicaState
from antiphon.router.rivals import PolicyName, policy_named

counts = st.integers(0, 10_000)
rate = st.just(0.0) | st.floats(0.2, 1e6)
few_seconds = st.just(0.0) | st.floats(1e-6, 2.0)
known_rates = st.builds(WorkerRates, rate, few_seconds, few_seconds, rate, few_seconds)
asks = st.builds(
    Ask,
    num_tokens=st.integers(1, 200_000),
    block_tokens=st.sampled_from([16, 32, 512]),
    num_answer_tokens=st.integers(0, 4096),
    session=st.binary(max_size=8),
)
overlaps = st.builds(Overlap, st.integers(0, 500), st.integers(0, 500))
states = st.builds(
    ReplicaState,
    replica=st.integers(0, 99),
    running=counts,
    waiting=counts,
    waiting_tokens=st.integers(0, 10**7),
    dispatched=counts,
    dispatched_tokens=st.integers(0, 10**7),
    own=counts,
    free_blocks=counts,
    num_blocks=counts,
    max_sequences=st.integers(0, 256),
    rates=known_rates,
    weight=st.floats(0.1, 10.0),
    cached_blocks=counts,
)
fleets = st.lists(states, min_size=1, max_size=8, unique_by=lambda state: state.replica)
draws = st.floats(0, 1, exclude_max=True)
PEERS = WorkerRates(3000.0, 0.02, 0.001, 100.0, 0.001)


def seconds(ask: Ask, state: ReplicaState, overlap: Overlap) -> float:
    return cost(ask, state, overlap, PEERS).total_s


def no_more(left: float, right: float) -> bool:
    """At most the right one, but for rounding."""
    return left <= right or math.isclose(left, right, rel_tol=1e-9)


@given(asks, states, overlaps, st.data())
def test_the_cost_never_falls_with_load(
    ask: Ask, state: ReplicaState, overlap: Overlap, data: st.DataObject
) -> None:
    """More running, waiting, sent or open, fewer free blocks, or less weight: never cheaper."""
    busier = msgspec.structs.replace(
        state,
        running=state.running + data.draw(counts),
        waiting=state.waiting + data.draw(counts),
        waiting_tokens=state.waiting_tokens + data.draw(counts),
        dispatched=state.dispatched + data.draw(counts),
        dispatched_tokens=state.dispatched_tokens + data.draw(counts),
        own=state.own + data.draw(counts),
        free_blocks=max(state.free_blocks - data.draw(counts), 0),
        cached_blocks=state.cached_blocks + data.draw(counts),
        weight=state.weight / data.draw(st.floats(1.0, 10.0)),
    )
    assert no_more(seconds(ask, state, overlap), seconds(ask, busier, overlap))


@given(asks, states, overlaps, st.integers(0, 99), st.integers(0, 99))
def test_the_cost_never_rises_with_overlap(
    ask: Ask, state: ReplicaState, overlap: Overlap, local: int, store: int
) -> None:
    """More of the prompt there, or in the store, or moved from the store to the replica: never dearer."""
    more = Overlap(overlap.local_blocks + local, overlap.store_blocks + store)
    assert no_more(seconds(ask, state, more), seconds(ask, state, overlap))
    moved = min(local, overlap.store_blocks)
    nearer = Overlap(overlap.local_blocks + moved, overlap.store_blocks - moved)
    assert no_more(seconds(ask, state, nearer), seconds(ask, state, overlap))


@given(asks, states, overlaps, st.floats(1.0, 10.0))
def test_a_faster_replica_is_never_dearer(
    ask: Ask, state: ReplicaState, overlap: Overlap, factor: float
) -> None:
    """Each rate better by a factor; one that is not known stays so."""
    slow = state.rates
    fast = WorkerRates(
        slow.prefill_tokens_per_s * factor,
        slow.step_s / factor,
        slow.store_rtt_s / factor,
        slow.store_blocks_per_s * factor,
        slow.import_s_per_block / factor,
    )
    faster = msgspec.structs.replace(state, rates=fast)
    assert no_more(seconds(ask, faster, overlap), seconds(ask, state, overlap))


@given(asks, states, overlaps)
def test_the_store_never_costs_more_than_computing(ask: Ask, state: ReplicaState, overlap: Overlap) -> None:
    """However slow it is, and what is counted as computed follows it."""
    with_store = cost(ask, state, overlap, PEERS)
    without = cost(ask, state, Overlap(overlap.local_blocks), PEERS)
    assert no_more(with_store.prefill_s, without.prefill_s)
    assert with_store.uses_store == (with_store.num_uncached < without.num_uncached)
    assert 1 <= with_store.num_uncached <= ask.num_tokens


@given(asks, overlaps, st.data())
def test_the_cost_is_finite_for_all_a_worker_may_say(ask: Ask, overlap: Overlap, data: st.DataObject) -> None:
    """NaN, infinities and nonsense from the wire are taken for not known."""
    number = st.floats()
    state = ReplicaState(
        0,
        *(data.draw(st.integers(0, 2**63)) for _ in range(9)),
        WorkerRates(*(data.draw(number) for _ in range(5))),
        data.draw(st.floats(0.0, allow_nan=False)),
        data.draw(st.integers(0, 2**63)),
    )
    told: Cost = cost(ask, state, overlap, peer_rates([state]))
    assert all(0 <= part < math.inf for part in (told.wait_s, told.prefill_s, told.answer_s, told.pressure_s))


@given(asks, fleets, st.data(), draws)
def test_the_least_cost_is_taken(
    ask: Ask, fleet: list[ReplicaState], data: st.DataObject, draw: float
) -> None:
    """Or one that cannot be told from it; the route names the costs of all."""
    there = [data.draw(overlaps) for _ in fleet]
    route = LeastCost().choose(ask, fleet, there, draw)
    assert route is not None
    costs = dict(route.costs)
    assert set(costs) == {state.replica for state in fleet}
    least = min(costs.values())
    if route.reason is not Reason.SPREAD:
        assert costs[route.replica] <= least + max(TIE_S, TIE_SHARE * least)


@given(st.sampled_from(PolicyName), asks, fleets, st.data(), draws)
def test_every_policy_takes_one_that_is_there(
    name: PolicyName, ask: Ask, fleet: list[ReplicaState], data: st.DataObject, draw: float
) -> None:
    """Whatever the fleet looks like; the only one where there is one; none where there is none."""
    policy = policy_named(name)
    there = [data.draw(overlaps) for _ in fleet]
    route = policy.choose(ask, fleet, there, draw)
    assert route is not None
    assert route.replica in {state.replica for state in fleet}
    assert 1 <= route.num_uncached <= ask.num_tokens
    assert (route.reason == "only_one") == (len(fleet) == 1)
    assert policy.choose(ask, [], [], draw) is None


@dataclass
class Sent:
    """What a gateway counts for each replica between two reports."""

    num: int = 0
    tokens: int = 0


@given(
    st.sampled_from([PolicyName.COST, PolicyName.LEAST_LOADED, PolicyName.SESSION]),
    st.integers(2, 8),
    st.randoms(use_true_random=False),
)
def test_no_herd_on_stale_reports(name: PolicyName, num_replicas: int, chance: Random) -> None:
    """Reports that never change: what was sent since spreads a burst evenly all the same."""
    policy = policy_named(name)
    sent = [Sent() for _ in range(num_replicas)]
    num_asks = 40 * num_replicas
    for _ in range(num_asks):
        fleet = [
            ReplicaState(i, dispatched=s.num, dispatched_tokens=s.tokens, max_sequences=64)
            for i, s in enumerate(sent)
        ]
        session = repr(chance.random()).encode()
        route = policy.choose(Ask(1000, 16, 100, session), fleet, [Overlap()] * num_replicas, chance.random())
        assert route is not None
        sent[route.replica].num += 1
        sent[route.replica].tokens += route.num_uncached
    assert max(s.num for s in sent) <= 1.3 * num_asks / num_replicas + 4
