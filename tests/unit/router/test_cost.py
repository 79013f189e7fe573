"""The cost of a request on a replica, with numbers, and the choice of the least."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from antiphon.core.generation import WorkerRates
from antiphon.router.cost import (
    ANSWER_TOKENS,
    ANSWER_WEIGHT,
    PREFILL_TOKENS_PER_S,
    PRESSURE_S,
    REUSE_SHARE,
    STEP_S,
    LeastCost,
    cost,
    peer_rates,
)
from antiphon.router.policy import NO_OVERLAP, Ask, Overlap, Reason, ReplicaState, Route

RATES = WorkerRates(10_000.0, 0.02, 0.001, 100.0, 0.002)
NOTHING = WorkerRates()
ASK = Ask(num_tokens=16_000, block_tokens=16, num_answer_tokens=100)


def state(replica: int = 0, **known: float) -> ReplicaState:
    """A replica with the usual rates."""
    return ReplicaState(replica, rates=RATES, **known)  # type: ignore[arg-type] # counts are whole numbers


def choose(
    states: Sequence[ReplicaState],
    overlaps: Sequence[Overlap] | None = None,
    ask: Ask = ASK,
    draw: float = 0.0,
) -> Route:
    there = overlaps if overlaps is not None else [NO_OVERLAP] * len(states)
    route = LeastCost().choose(ask, states, there, draw)
    assert route is not None
    return route


def spread(states: Sequence[ReplicaState], overlaps: Sequence[Overlap] | None = None) -> set[int]:
    """The replicas taken over the range of draws."""
    return {choose(states, overlaps, draw=n / 100).replica for n in range(100)}


def test_the_parts_of_a_cost() -> None:
    """Waiting prompts, own prompt, answer and pressure, each by its formula."""
    told = cost(
        ASK,
        state(running=16, waiting_tokens=4000, dispatched_tokens=1000, max_sequences=32, num_blocks=0),
        Overlap(local_blocks=500),
        NOTHING,
    )
    assert told.wait_s == pytest.approx(5000 / 10_000)
    assert told.prefill_s == pytest.approx(8000 / 10_000)
    assert told.answer_s == pytest.approx(ANSWER_WEIGHT * 100 * 0.02 * 1.5)
    assert told.pressure_s == 0.0
    assert told.num_uncached == 8000
    assert told.total_s == told.wait_s + told.prefill_s + told.answer_s


def test_the_store_counts_at_its_measured_rate() -> None:
    """200 blocks from the store: a round trip, 10 ms and the import of each, against 16 tokens each."""
    slow = cost(ASK, state(), Overlap(500, 200), NOTHING)
    assert slow.prefill_s == pytest.approx(0.8), "12 ms a block against 1.6 ms: computed"
    fast = ReplicaState(0, rates=WorkerRates(10_000.0, 0.02, 0.001, 2000.0, 0.0001))
    told = cost(ASK, fast, Overlap(500, 200), NOTHING)
    assert told.prefill_s == pytest.approx(0.001 + 200 * 0.0006 + 4800 / 10_000)
    assert told.uses_store
    assert told.num_uncached == 4800


def test_a_store_that_nobody_measured_supplies_nothing() -> None:
    """An unknown store is no reason to go anywhere."""
    blind = ReplicaState(0, rates=WorkerRates(10_000.0, 0.02))
    assert cost(ASK, blind, Overlap(0, 900), NOTHING).prefill_s == pytest.approx(1.6)


def test_a_prompt_that_is_wholly_there_still_computes_its_last_token() -> None:
    """Its logits are the first answer token's."""
    assert cost(ASK, state(), Overlap(1000), NOTHING).num_uncached == 1
    assert cost(ASK, state(), Overlap(600, 900), NOTHING).num_uncached >= 1


def test_full_slots_are_waited_for() -> None:
    """One above the slots waits for a share of an answer, two for twice that; prompts may take longer."""
    full = cost(ASK, state(running=32, max_sequences=32), NO_OVERLAP, NOTHING).wait_s
    fuller = cost(ASK, state(running=32, waiting=1, max_sequences=32), NO_OVERLAP, NOTHING).wait_s
    assert full == pytest.approx(ANSWER_TOKENS * 2 * 0.02 / 32)
    assert fuller == pytest.approx(2 * full)
    longer = state(running=32, waiting=1, waiting_tokens=50_000, max_sequences=32)
    assert cost(ASK, longer, NO_OVERLAP, NOTHING).wait_s == pytest.approx(5.0)
    assert cost(ASK, state(running=31, max_sequences=32), NO_OVERLAP, NOTHING).wait_s == 0.0


def test_a_full_kv_cache_presses() -> None:
    """k/(1−k) of the blocks in use once this request has its own; finite at the end."""
    ask = Ask(1600, 16, 160)  # 110 blocks
    half = cost(ask, state(free_blocks=610, num_blocks=1000), NO_OVERLAP, NOTHING)
    assert half.pressure_s == pytest.approx(PRESSURE_S)
    full = cost(ask, state(free_blocks=0, num_blocks=1000), NO_OVERLAP, NOTHING)
    assert full.pressure_s == pytest.approx(PRESSURE_S * 49)


def test_pushing_out_what_others_may_want_costs() -> None:
    """60 of 100 new blocks find no empty one: half of them will be missed, at 1.6 ms each."""
    full = state(free_blocks=9000, cached_blocks=8960, num_blocks=10_000)
    roomy = state(free_blocks=9000, cached_blocks=8900, num_blocks=10_000)
    ask = Ask(1600, 16)
    here, there = (cost(ask, s, NO_OVERLAP, NOTHING).pressure_s for s in (full, roomy))
    assert here - there == pytest.approx(REUSE_SHARE * 60 * 0.0016)
    held = cost(ask, full, Overlap(60), NOTHING).pressure_s
    assert held == pytest.approx(there), "blocks that are there push nothing out"


def test_what_a_fast_store_keeps_may_be_pushed_out() -> None:
    """It comes back at the store's price where that is below computing."""
    fast = WorkerRates(10_000.0, 0.02, 0.001, 10_000.0, 0.00001)
    full = ReplicaState(0, free_blocks=9000, cached_blocks=9000, num_blocks=10_000, rates=fast)
    roomy = ReplicaState(0, free_blocks=9000, num_blocks=10_000, rates=fast)
    here, there = (cost(Ask(1600, 16), s, NO_OVERLAP, NOTHING).pressure_s for s in (full, roomy))
    assert here - there == pytest.approx(REUSE_SHARE * 100 * 0.00011)


def test_unknown_rates_are_taken_from_the_peers() -> None:
    """A replica that has measured nothing costs what it would at the middle of the others' rates."""
    fleet = [state(1), ReplicaState(2), ReplicaState(3, rates=WorkerRates(20_000.0, 0.01))]
    route = choose(fleet)
    peers = peer_rates(fleet)
    assert peers.prefill_tokens_per_s in (10_000.0, 20_000.0)
    assert dict(route.costs)[2] == cost(ASK, ReplicaState(2, rates=peers), NO_OVERLAP, NOTHING).total_s


def test_where_nobody_knows_rates_there_are_defaults() -> None:
    """The fleet that has measured nothing is still told apart by its load."""
    peers = peer_rates([ReplicaState(1), ReplicaState(2)])
    assert (peers.prefill_tokens_per_s, peers.step_s) == (PREFILL_TOKENS_PER_S, STEP_S)
    route = choose([ReplicaState(1, waiting_tokens=100_000), ReplicaState(2)])
    assert (route.replica, route.reason) == (2, Reason.LEAST_COST)


def test_the_holder_is_taken_where_its_queue_is_shorter_than_the_computing() -> None:
    """1 s of prompts before it against 1.6 s of computing: worth the wait; 3 s are not."""
    there = [Overlap(999), NO_OVERLAP]
    taken = choose([state(1, waiting_tokens=10_000), state(2)], there)
    assert (taken.replica, taken.reason) == (1, Reason.PREFIX)
    assert taken.num_uncached == 16
    passed = choose([state(1, waiting_tokens=30_000), state(2)], there)
    assert (passed.replica, passed.reason) == (2, Reason.SPILL)


def test_the_store_lets_a_busy_holder_be_passed_over_sooner() -> None:
    """With the prefix in a fast store another replica is taken at a queue for which it would not be."""
    fast = WorkerRates(10_000.0, 0.02, 0.001, 10_000.0, 0.00001)
    fleet = [ReplicaState(1, waiting_tokens=10_000, rates=fast), ReplicaState(2, rates=fast)]
    assert choose(fleet, [Overlap(999), NO_OVERLAP]).replica == 1
    route = choose(fleet, [Overlap(999), Overlap(0, 999)])
    assert (route.replica, route.reason) == (2, Reason.STORE)


def test_a_miss_goes_to_the_least_loaded() -> None:
    """Row 31: whoever holds the fewest blocks does not matter, only who has the least to do."""
    fleet = [state(n, waiting_tokens=1000 * n, num_blocks=9000, free_blocks=8000 + n) for n in (3, 1, 2)]
    assert choose(fleet).replica == 1


def test_ties_are_even_over_the_draws() -> None:
    """Row 32: with nothing to tell them apart each replica is taken as often, not always the first."""
    fleet = [state(n) for n in range(8)]
    counts = [sum(choose(fleet, draw=d / 800).replica == n for d in range(800)) for n in range(8)]
    assert counts == [100] * 8
    assert choose(fleet).reason is Reason.RANDOM_TIE


def test_rates_that_differ_by_noise_do_not_break_ties() -> None:
    """Row 32 in other words: idle replicas measured 1 % apart share the work."""
    fleet = [
        ReplicaState(n, rates=WorkerRates(10_000.0 * (1 + n / 400), 0.02, 0.001, 100.0)) for n in range(4)
    ]
    assert spread(fleet) == {0, 1, 2, 3}


def test_a_shared_system_prompt_does_not_herd() -> None:
    """One block that everybody's prompt begins with draws nobody to its holder once that has work."""
    there = [Overlap(2), *[NO_OVERLAP] * 3]
    fleet = [state(0, waiting_tokens=1000), *(state(n) for n in (1, 2, 3))]
    assert spread(fleet, there) == {1, 2, 3}


def test_a_few_leave_a_holder_without_room() -> None:
    """On a quiet fleet one request in 256 makes another holder, if the first must push blocks out for it."""
    full = state(0, free_blocks=9000, cached_blocks=9000, num_blocks=9000)
    fleet = [full, *(state(n, free_blocks=9000, cached_blocks=9000, num_blocks=9000) for n in (1, 2))]
    there = [Overlap(900), NO_OVERLAP, NO_OVERLAP]
    routes = [choose(fleet, there, draw=n / 5120) for n in range(5120)]
    left = [route for route in routes if route.reason is Reason.SPREAD]
    assert len(left) == 20
    assert {route.replica for route in left} == {1, 2}
    assert all(route.num_uncached == 16_000 for route in left)
    assert {route.replica for route in routes if route not in left} == {0}


def test_none_leave_a_holder_with_room() -> None:
    """Nothing is lost by staying: every request stays."""
    fleet = [state(n, free_blocks=9000, cached_blocks=2000, num_blocks=9000) for n in range(3)]
    there = [Overlap(900), NO_OVERLAP, NO_OVERLAP]
    assert {choose(fleet, there, draw=n / 5120).replica for n in range(5120)} == {0}


def test_a_prompt_sent_since_the_report_counts() -> None:
    """Rows 30 and 33: the replica that looks idle but was just sent a long prompt is not taken again."""
    fleet = [state(0, dispatched=1, dispatched_tokens=32_000), state(1)]
    assert spread(fleet) == {1}


def test_open_answers_count_where_the_report_left_too_early() -> None:
    """Row 29: no path hides a replica's load; this gateway's open answers are a lower bound."""
    fleet = [state(0, own=20, max_sequences=32), state(1, running=1, max_sequences=32)]
    assert spread(fleet) == {1}


def test_a_heavier_replica_gets_its_share() -> None:
    """Three times the weight, three times the work of a burst."""
    sent = {1: 0, 2: 0}
    tokens = {1: 0, 2: 0}
    weights = {1: 1.0, 2: 3.0}
    for number in range(400):
        fleet = [
            state(r, dispatched=sent[r], dispatched_tokens=tokens[r], max_sequences=100, weight=weights[r])
            for r in sent
        ]
        route = choose(fleet, draw=number % 10 / 10)
        sent[route.replica] += 1
        tokens[route.replica] += route.num_uncached
    assert sent[2] == pytest.approx(3 * sent[1], rel=0.1)


def test_the_only_one_and_none() -> None:
    """One candidate is taken however bad; without any there is no route."""
    lone = choose([state(7, waiting_tokens=10**9, free_blocks=0, num_blocks=10)])
    assert (lone.replica, lone.reason) == (7, Reason.ONLY_ONE)
    assert LeastCost().choose(ASK, [], [], 0.5) is None


def test_a_route_in_words() -> None:
    """The taken one with its reason and cost, then the next best three; rivals have no costs."""
    route = Route(3, Reason.PREFIX, ((1, 1.25), (3, 0.4123), (7, 0.93), (8, 9.0), (9, 5.5)))
    assert route.text("w{}".format) == "w3 prefix 0.412; w7 0.930, w1 1.250, w9 5.500"
    assert Route(3, Reason.ONLY_ONE, ((3, 0.5),)).text(str) == "3 only_one 0.500"
    assert Route(3, Reason.ROUND_ROBIN).text("w{}".format) == "w3 round_robin"
