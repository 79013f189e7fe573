"""bench/routing*: the replica on virtual time against arithmetic, and what policies make of a trace."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench.errors import BenchFault
from bench.load import percentile
from bench.routing import (
    LONGEST_PREFIX,
    OURS,
    RANDOM,
    SIDES,
    LongestPrefix,
    Settings,
    one_cache_hit_rate,
    quiet_day,
    replay,
    side_named,
)
from bench.routing_decision import Settings as ChoiceSettings
from bench.routing_decision import World, time_choices
from bench.routing_replica import Lru, Pace, Replica
from bench.routing_trace import CONVERSATION, Line, Request, read, spread

from antiphon.router.cost import LeastCost
from antiphon.router.policy import Ask, Overlap, Policy, ReplicaState

PACE = Pace(
    prefill_tokens_per_s=1000.0,
    step_s=0.01,
    sequence_s=0.0,
    chunk_tokens=500,
    store_rtt_s=0.5,
    store_blocks_per_s=4.0,
    import_s_per_block=0.0,
    num_blocks=100,
)


def request(at_s: float = 0.0, *, blocks: Sequence[int] = (1, 2), num_answer_tokens: int = 10) -> Request:
    return Request(at_s, 512 * len(blocks), num_answer_tokens, tuple(blocks))


def chats(number: int, *, every_s: float = 0.05) -> list[Request]:
    """Conversations in turns, all after block 0: like the public trace, and small."""
    made, turns = [], Counter[int]()
    for turn in range(number):
        chat = 1 + (turn * 7919) % (number // 4)
        turns[chat] += 1
        own = range(100 * chat, 100 * chat + 4 * turns[chat])
        made.append(Request(turn * every_s, 512 * (1 + len(own)), 50, (0, *own)))
    return made


def test_a_lone_request_takes_its_prompt() -> None:
    """1,024 tokens at 1,000 a second; then the first token is out, and ten steps later it is gone."""
    replica = Replica(PACE, None)
    replica.take(request())
    replica.advance(1.0)
    assert not replica.ended
    assert replica.state(0).waiting_tokens == pytest.approx(24, abs=1)
    replica.advance(1.1)
    assert replica.ended[0].first_s == pytest.approx(1.024)
    assert replica.num_running == 1
    replica.advance(2.0)
    assert replica.num_running == 0
    assert replica.busy_s == pytest.approx(1.124)


def test_prompts_wait_for_each_other_and_share_what_is_computed() -> None:
    """The second of the same prompt waits, then finds all of its blocks and computes one token."""
    replica = Replica(PACE, None)
    replica.take(request())
    replica.take(request())
    assert replica.num_waiting == 1
    replica.advance(3.0)
    assert [job.num_cached for job in replica.ended] == [0, 2]
    assert replica.ended[1].first_s == pytest.approx(1.025, abs=0.01)


def test_answers_are_slower_while_a_prompt_is_computed() -> None:
    """A step with 500 prompt tokens takes 0.5 s: the answer gets two tokens while a prompt of 1 s runs."""
    replica = Replica(PACE, None)
    replica.take(request(num_answer_tokens=100))
    replica.advance(1.024 + 0.5)  # 50 tokens are out
    replica.take(request(blocks=(8, 9)))
    replica.advance(1.024 + 0.5 + 1.024 + 0.479)
    assert replica.num_running == 1
    replica.advance(1.024 + 0.5 + 1.024 + 0.481)
    assert replica.num_running == 0


def test_what_the_store_has_is_fetched_where_that_is_faster() -> None:
    """Six blocks in 2 s against 3 s of computing; one block in 0.75 s against 0.5 s."""
    store = Lru(100)
    store.put(range(6))
    replica = Replica(PACE, store)
    replica.take(request(blocks=range(6)))
    replica.advance(9.0)
    assert replica.ended[0].num_cached == 6
    assert replica.ended[0].first_s == pytest.approx(2.0, abs=0.01)
    other = Replica(PACE, store)
    other.take(request(blocks=(0, 77)))
    other.advance(9.0)
    assert other.ended[0].num_cached == 0


def test_slots_bound_what_runs() -> None:
    """With one slot the second prompt begins when the first answer ends."""
    replica = Replica(replace(PACE, max_sequences=1), None)
    replica.take(request())
    replica.take(request(blocks=(8, 9)))
    replica.advance(9.0)
    assert replica.ended[1].first_s == pytest.approx(1.024 + 0.1 + 1.024)


def test_a_chain_is_thrown_out_from_its_end() -> None:
    """A full cache keeps the beginnings, and what was used last."""
    cache = Lru(4)
    cache.put((1, 2, 3))
    cache.put((4, 5))
    assert [cache.match((1, 2, 3)), cache.match((4, 5))] == [2, 2]
    assert len(cache) == 4


def test_equal_timestamps_are_spread() -> None:
    """Three requests in a bucket of 3 s come a second apart."""
    lines = [Line(at, 512, 1, (1,)) for at in (0.0, 0.0, 0.0, 3000.0)]
    assert [one.at_s for one in spread(lines)] == [0.0, 1.0, 2.0, 3.0]


def test_without_traces_it_says_what_is_missing(tmp_path: Path) -> None:
    """No folder, or one without the file: a plain word, no traceback."""
    for folder in (None, tmp_path):
        with pytest.raises(BenchFault, match="ANTIPHON_TRACES"):
            read(folder, CONVERSATION)


def test_a_trace_is_read(tmp_path: Path) -> None:
    """One JSON object a line, other fields ignored."""
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [4, 5], "x": 1}\n'
    (tmp_path / CONVERSATION).write_text(line * 2)
    first, _ = read(tmp_path, CONVERSATION)
    assert first == Request(1.5, 700, 3, (4, 5))
    assert first.session == b"4"


@pytest.mark.parametrize("side", SIDES)
def test_every_side_answers_every_request(side: str) -> None:
    """Nothing is lost on the way, and loads add up."""
    requests = chats(200)
    outcome = replay(requests, side_named(side), Settings(num_replicas=4), has_store=True)
    assert len(outcome.ttfts_s) == 200
    assert min(outcome.ttfts_s) > 0
    assert sum(outcome.reasons.values()) == 200
    assert all(1 <= ratio <= 4 for ratio in outcome.busiest.values())


def test_ours_finds_what_random_misses() -> None:
    """On chats that come back: twice the hits of random, near one cache of all memory with a store."""
    requests = chats(600)
    settings = Settings(num_replicas=8, replica_tokens=512 * 700, store_tokens=512 * 6000)
    ours, lot = (replay(requests, side_named(s), settings, has_store=False) for s in (OURS, RANDOM))
    assert ours.hit_rate >= 2 * lot.hit_rate
    assert percentile(ours.ttfts_s, 90) < percentile(lot.ttfts_s, 90)
    shared = replay(requests, side_named(OURS), settings, has_store=True)
    assert shared.hit_rate >= 0.95 * one_cache_hit_rate(requests, 512 * 11_600)


def test_a_quiet_day_does_not_herd() -> None:
    """Nobody is busy, all prompts begin alike: a full holder lets others become holders."""
    settings = Settings(num_replicas=4, replica_tokens=512 * 300, quiet_factor=20.0, quiet_shared_blocks=3)
    quiet = quiet_day(chats(4000), settings)
    ours, longest = (replay(quiet, side_named(s), settings, has_store=False) for s in (OURS, LONGEST_PREFIX))
    assert ours.busiest["requests"] <= 1.5 < longest.busiest["requests"]


def shares(policy: Policy, requests: Sequence[Request], num_replicas: int) -> Counter[int]:
    """Who gets how much where a replica counts as a holder from the moment it is chosen, and nothing ends."""
    caches = [Lru(10**9) for _ in range(num_replicas)]
    sent, tokens = Counter[int](), Counter[int]()
    for number, one in enumerate(requests):
        states = [
            ReplicaState(n, dispatched=sent[n], dispatched_tokens=tokens[n]) for n in range(num_replicas)
        ]
        there = [Overlap(cache.match(one.blocks)) for cache in caches]
        route = policy.choose(Ask(one.num_tokens, 512), states, there, number % 10 / 10)
        assert route is not None
        sent[route.replica] += 1
        tokens[route.replica] += max(route.num_uncached, 1)
        caches[route.replica].put(one.blocks)
    return sent


def trace() -> list[Request]:
    """The public one where it lies, else one made like it."""
    folder = os.environ.get("ANTIPHON_TRACES")
    return read(Path(folder), CONVERSATION) if folder else chats(2000)


def test_pure_longest_prefix_puts_the_whole_conversation_trace_on_one_replica() -> None:
    """Row 6: every prompt begins with block 0, so its first holder gets all; ours spreads them evenly."""
    requests = trace()
    assert max(shares(LongestPrefix(), requests, 10).values()) == len(requests)
    ours = shares(LeastCost(), requests, 10)
    assert max(ours.values()) <= 1.25 * len(requests) / 10


def test_a_choice_is_timed_in_parts() -> None:
    """The decision bench makes a world whose prompts are known, and times each choice."""
    world = World(ChoiceSettings(prompt_blocks=100, most_held_blocks=80), 70)
    view = world.survey.view(world.generation(3))
    assert max(overlap.local_blocks for overlap in view.overlaps) == 100
    timings = time_choices(world, 20)
    assert len(timings.deciding_s) == len(timings.hashing_s) == 20
    assert set(timings.row()) >= {"hashing p50 µs", "both p50 µs"}
