"""Blocks into an engine: what is taken in, and what whoever waits for it gets."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.clock import VirtualClock
from antiphon.core.errors import BadRequest
from antiphon.core.generation import CachedTokens, KvReport, Terminal
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from support.twoengines import (
    BLOCK,
    FETCHED,
    PROMPT,
    Arrivals,
    Make,
    engine_with,
    held,
    ids,
    run,
    saved_elsewhere,
)


@pytest.fixture
def saved(make_generation: Make) -> Arrivals:
    """The four blocks of PROMPT, computed by another engine."""
    return saved_elsewhere(make_generation)


@pytest.fixture
def cold(make_generation: Make) -> list[int]:
    """The answer to PROMPT of an engine that computed everything."""
    engine = engine_with()
    engine.add(make_generation("g", PROMPT))
    return ids(run(engine))


def test_blocks_from_elsewhere_are_used_as_if_computed(
    make_generation: Make, saved: Arrivals, cold: list[int]
) -> None:
    """The answer is that of a cold run, the prompt's full blocks are not computed, and both are said."""
    engine = engine_with()
    prefix = held(engine, make_generation)
    assert [block for block, _, _ in saved] == list(prefix.blocks)
    engine.supply("g", saved, KvReport(fetched_bytes=1024, fetch_s=0.01, saved_s=0.5, decision="fetched"))
    outputs = run(engine)
    assert ids(outputs) == cold
    assert engine.counters.prefill_tokens == len(PROMPT) - 4 * BLOCK
    assert outputs[0].cached == CachedTokens(store=4 * BLOCK)
    assert outputs[0].kv == KvReport(0, 0, 4, 0, 1024, 0.01, 0.5, "fetched")
    assert all(output.kv is None for output in outputs[1:])


def test_a_held_generation_does_not_keep_the_engine_busy(make_generation: Make) -> None:
    """Nothing to do until its time comes; then it is computed, and the report says late."""
    clock = VirtualClock()
    engine = engine_with(clock=clock)
    held(engine, make_generation)
    assert not engine.has_work
    assert engine.next_deadline_s == 1.0
    clock.advance(1.0)
    assert engine.has_work
    outputs = run(engine)
    assert outputs[0].kv == KvReport(num_computed=4, decision="late")
    assert engine.next_deadline_s is None


def test_an_answers_own_deadline_wakes_a_held_engine(make_generation: Make) -> None:
    """Whoever waits for blocks can run out of time too."""
    clock = VirtualClock()
    engine = engine_with(clock=clock)
    held(engine, make_generation, timeout_s=0.5)
    assert engine.next_deadline_s == 0.5
    clock.advance(0.5)
    assert [output.finish for output in run(engine)] == [Terminal.DEADLINE]
    assert engine.next_deadline_s is None


def test_a_hold_can_be_released(make_generation: Make, cold: list[int]) -> None:
    """Nothing will come: compute."""
    engine = engine_with()
    held(engine, make_generation)
    engine.release_hold("g")
    outputs = run(engine)
    assert ids(outputs) == cold
    assert outputs[0].kv == KvReport(num_computed=4, decision="fault")


def test_what_comes_after_the_hold_but_before_admission_is_used(
    make_generation: Make, saved: Arrivals
) -> None:
    """A full engine makes the wait longer; the blocks are no less good."""
    clock = VirtualClock()
    engine = engine_with(clock=clock)
    for number in range(4):
        engine.add(make_generation(f"r{number}", [100 + number], max_tokens=5))
    held(engine, make_generation)
    clock.advance(2.0)
    engine.step()
    engine.supply("g", saved, FETCHED)
    first = next(output for output in run(engine) if output.generation == "g")
    assert (first.cached, first.kv) == (CachedTokens(store=64), KvReport(num_store=4, decision="fetched"))


def test_what_comes_too_late_changes_nothing(make_generation: Make, saved: Arrivals) -> None:
    """For one that runs, one that has ended and one that never was."""
    clock = VirtualClock()
    engine = engine_with(clock=clock)
    held(engine, make_generation)
    clock.advance(1.0)
    engine.step()
    for name in ("g", "ended", "unknown"):
        engine.supply(name, saved, FETCHED)
    assert engine.counters.imported_blocks == 0
    run(engine)


def test_choices_share_what_came_for_one(make_generation: Make, saved: Arrivals) -> None:
    """The first is told where it came from; to the others it is in the engine."""
    engine = engine_with()
    held(engine, make_generation, n=3)
    engine.supply("g", saved, FETCHED)
    firsts = {output.choice: output for output in reversed(run(engine))}
    assert [firsts[c].cached for c in range(3)] == [
        CachedTokens(store=64),
        CachedTokens(engine=64),
        CachedTokens(engine=64),
    ]
    assert [firsts[c].kv is None for c in range(3)] == [False, True, True]
    assert engine.counters.imported_blocks == 4


def test_the_hold_passes_on_when_a_choice_is_aborted(make_generation: Make, saved: Arrivals) -> None:
    """The others still wait for the blocks, and the last one takes the hold with it."""
    engine = engine_with()
    held(engine, make_generation, n=2)
    engine.abort("g", 0)
    engine.step()
    assert engine.is_held("g")
    engine.supply("g", saved, FETCHED)
    assert next(o for o in run(engine) if o.ids).cached == CachedTokens(store=64)
    held(engine, make_generation, name="other", tenant="two", n=2)
    engine.abort("other")
    assert not engine.is_held("other")
    assert not engine.is_open("other")


def test_a_follower_waits_for_the_leaders_fetch(make_generation: Make, saved: Arrivals) -> None:
    """An identical prompt neither fetches nor computes what is about to come."""
    engine = engine_with()
    held(engine, make_generation, name="leader")
    engine.add(make_generation("follower", PROMPT), hold_s=1.0)
    assert not engine.is_held("follower")
    assert not engine.has_work
    engine.supply("leader", saved, FETCHED)
    firsts = {output.generation: output for output in reversed(run(engine))}
    assert firsts["leader"].cached == CachedTokens(store=64)
    assert firsts["follower"].cached == CachedTokens(engine=64)
    assert firsts["follower"].kv == KvReport(num_local=4)
    assert engine.counters.prefill_tokens == 2 * 6


def test_only_what_follows_without_a_gap_is_taken(make_generation: Make, saved: Arrivals) -> None:
    """A hole, another chain's block or a block too many ends it; nothing else happens."""
    cut: list[tuple[Arrivals, int]] = [
        (saved[:2], 2),
        ([saved[0], saved[2], saved[3]], 1),
        (saved[1:], 0),
        ([saved[0], (replace(saved[1][0], hash=b"x" * 32), saved[1][1], Tier.STORE)], 1),
        ([*saved, (KvBlock(b"y" * 32, 4, (1,) * 16, b""), saved[0][1], Tier.STORE)], 4),
        ([], 0),
    ]
    for arrivals, num_taken in cut:
        engine = engine_with()
        held(engine, make_generation)
        engine.supply("g", arrivals, FETCHED)
        assert engine.counters.imported_blocks == num_taken
        outputs = run(engine)
        assert outputs[0].cached == CachedTokens(store=BLOCK * num_taken)


@pytest.mark.parametrize("change", [b"", b"x" * 255, b"x" * 257])
def test_a_payload_of_a_wrong_length_ends_the_chain(
    make_generation: Make, saved: Arrivals, cold: list[int], change: bytes
) -> None:
    """It is counted, no block is lost to it, and the rest is computed."""
    engine = engine_with()
    held(engine, make_generation)
    spoiled = [saved[0], (saved[1][0], change, Tier.HOST), *saved[2:]]
    engine.supply("g", spoiled, FETCHED)
    engine.check()
    assert (engine.counters.imported_blocks, engine.counters.refused_blocks) == (1, 1)
    assert ids(run(engine)) == cold


def test_what_is_here_by_now_is_skipped(make_generation: Make, saved: Arrivals) -> None:
    """Blocks that came for somebody else since the question was asked are not taken twice."""
    engine = engine_with()
    held(engine, make_generation)
    engine.add(make_generation("longer", [*PROMPT, *range(20)]), hold_s=1.0)
    assert engine.is_held("longer")
    engine.supply("longer", saved[:2], FETCHED)
    engine.supply("g", saved, FETCHED)
    assert engine.counters.imported_blocks == 4
    firsts = {output.generation: output for output in reversed(run(engine))}
    assert firsts["longer"].cached == CachedTokens(store=32, engine=32)
    assert firsts["g"].cached == CachedTokens(store=32, engine=32)


def test_blocks_evicted_meanwhile_make_a_gap(make_generation: Make, saved: Arrivals) -> None:
    """What was here when the question was asked may be gone when the answer comes."""
    engine = engine_with(num_blocks=8)
    engine.add(make_generation("first", PROMPT[:33], max_tokens=1))
    run(engine)
    prefix = held(engine, make_generation)
    assert prefix.num_local == 2
    engine.add(make_generation("big", [201] * 110, max_tokens=2))
    engine.step()
    engine.supply("g", saved[2:], FETCHED)
    assert engine.counters.imported_blocks == 0
    run(engine)


def test_running_sequences_keep_their_blocks(make_generation: Make, saved: Arrivals) -> None:
    """What comes has to do with what they leave."""
    engine = engine_with(num_blocks=8)
    engine.add(make_generation("big", [201] * 90, max_tokens=10))
    engine.step()
    held(engine, make_generation)
    engine.supply("g", saved, FETCHED)
    assert engine.counters.imported_blocks == 2
    outputs = run(engine)
    assert engine.counters.preemptions == 0
    assert len(ids([o for o in outputs if o.generation == "big"])) == 10


def test_tenants_take_nothing_of_each_other(make_generation: Make, saved: Arrivals) -> None:
    """A block of the same tokens under another scope is no block of this chain; a public one is."""
    engine = engine_with()
    held(engine, make_generation, tenant="other")
    engine.supply("g", saved, FETCHED)
    assert engine.counters.imported_blocks == 0
    for tenant in ("one", "two"):
        made = make_generation(tenant, PROMPT, tenant=tenant)
        blocks = engine.add(msgspec.structs.replace(made, num_public_tokens=40), hold_s=0.0).blocks
        assert [block.scope for block in blocks] == [PUBLIC_SCOPE] * 2 + [b"tenant:" + tenant.encode()] * 2
    run(engine)


def test_the_public_scope_is_nobodys(make_generation: Make) -> None:
    """A generation that claims it, or more public tokens than it has, is refused."""
    engine = engine_with()
    made = make_generation("g", PROMPT)
    for change in ({"scope": PUBLIC_SCOPE}, {"num_public_tokens": 71}, {"num_public_tokens": -1}):
        with pytest.raises(BadRequest):
            engine.add(msgspec.structs.replace(made, **change))


def test_without_anybody_to_ask_no_blocks_are_named(make_generation: Make) -> None:
    """An engine alone does not even list them, and runs at once."""
    engine = engine_with()
    assert engine.add(make_generation("g", PROMPT)) == Prefix("g", (), 0, len(PROMPT))
    assert engine.has_work


def test_forgotten_tenants_are_computed_anew(make_generation: Make, saved: Arrivals, cold: list[int]) -> None:
    """What came from elsewhere and what was computed here goes; others keep theirs, answers stay the same."""
    engine = engine_with()
    held(engine, make_generation)
    engine.supply("g", saved, FETCHED)
    assert ids(run(engine)) == cold
    engine.add(make_generation("h", PROMPT, tenant="other"))
    run(engine)
    num_held = engine.load().cached_blocks
    engine.forget({b"tenant:local"})
    engine.check()
    num_left = engine.load().cached_blocks
    assert 0 < num_left < num_held
    assert {block.scope for block in engine.exportable()} == {b"tenant:other"}
    engine.add(make_generation("i", PROMPT))
    outputs = run(engine)
    assert ids(outputs) == cold
    assert outputs[0].cached == CachedTokens()
    engine.add(make_generation("j", PROMPT, tenant="other"))
    assert run(engine)[0].cached == CachedTokens(engine=4 * BLOCK)


def test_public_blocks_are_nobodys(make_generation: Make) -> None:
    """Those of the operator's prefixes stay, whoever computed them."""
    engine = engine_with()
    generation = msgspec.structs.replace(make_generation("g", PROMPT), num_public_tokens=2 * BLOCK)
    engine.add(generation)
    run(engine)
    engine.forget({b"tenant:local"})
    assert engine.load().cached_blocks == 2
