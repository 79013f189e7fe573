"""Blocks into and out of an engine: what is taken in, what is offered, and when.

Two engines on scripted runners stand for two workers; a payload goes from one to the other as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.clock import VirtualClock
from antiphon.core.errors import BadRequest
from antiphon.core.generation import CachedTokens, Generation, KvReport, StepOutput, Terminal
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import Chunk, Logits, RunnerFault
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings

Make = Callable[..., Generation]
Arrivals = list[tuple[KvBlock, bytes, Tier]]
BLOCK = 16
PROMPT = [i % 200 for i in range(70)]  # four full blocks and some
FETCHED = KvReport(decision="fetched")


RUNNER = ScriptedSettings(context_tokens=256, max_sequences=4)


class SlowRunner(ScriptedRunner):
    """Copying a block in takes 1 s, clearing a place 10 s, taking one over 0.25 s, a step 2 s."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(SCRIPTS["babble"], RUNNER)
        self._clock = clock

    def open(self, sequence: int, blocks: list[int]) -> float:
        super().open(sequence, blocks)
        self._clock.advance(10.0 + len(blocks))
        return float(len(blocks))

    def run(self, chunks: list[Chunk]) -> Logits:
        self._clock.advance(2.0)
        return super().run(chunks)

    def import_block(self, block: int, payload: bytes | memoryview) -> None:
        self._clock.advance(0.25)
        super().import_block(block, payload)


def engine_with(
    *,
    num_blocks: int = 100,
    checkpoint_blocks: int | None = 2,
    clock: VirtualClock | None = None,
    runner: ScriptedRunner | None = None,
) -> Engine:
    runner = runner or ScriptedRunner(SCRIPTS["babble"], RUNNER)
    settings = EngineSettings(
        num_blocks=num_blocks, namespace=b"n", checkpoint_blocks=checkpoint_blocks, token_budget=32
    )
    return Engine(runner, settings, clock or VirtualClock())


def run(engine: Engine) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.check()
    return outputs


def ids(outputs: list[StepOutput]) -> list[int]:
    return [i for output in outputs for i in output.ids]


@pytest.fixture
def saved(make_generation: Make) -> Arrivals:
    """The four blocks of PROMPT, computed by another engine."""
    other = engine_with()
    other.add(make_generation("x", PROMPT, max_tokens=1))
    run(other)
    return [(block, payload, Tier.STORE) for block, payload in other.export(other.exportable())]


@pytest.fixture
def cold(make_generation: Make) -> list[int]:
    """The answer to PROMPT of an engine that computed everything."""
    engine = engine_with()
    engine.add(make_generation("g", PROMPT))
    return ids(run(engine))


def held(engine: Engine, make_generation: Make, name: str = "g", **options: object) -> Prefix:
    """A generation that waits for its blocks."""
    prefix = engine.add(make_generation(name, PROMPT, **options), hold_s=1.0)
    assert engine.is_held(name)
    return prefix


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


def test_blocks_are_due_at_the_prompts_end_then_now_and_then_and_at_the_end(make_generation: Make) -> None:
    """Each once, in the order of its chain."""
    engine = engine_with(checkpoint_blocks=2)
    engine.add(make_generation("g", PROMPT, max_tokens=64))
    due: list[list[int]] = []
    while engine.has_work:
        engine.step()
        blocks = engine.exportable()
        if blocks:
            due.append([block.index for block in blocks])
    assert due == [[0, 1, 2, 3], [4, 5], [6, 7]]
    engine.check()


def test_an_aborted_answer_leaves_what_it_computed(make_generation: Make) -> None:
    """Its blocks are as good as any, and come with the next call."""
    engine = engine_with()
    engine.add(make_generation("g", PROMPT))
    engine.step()
    assert engine.exportable() == []
    engine.abort("g")
    assert [block.index for block in engine.exportable()] == [0, 1]


def test_what_came_from_elsewhere_is_not_sent_back(make_generation: Make, saved: Arrivals) -> None:
    """Only what this engine computed is due."""
    engine = engine_with()
    held(engine, make_generation)
    engine.supply("g", saved[:3], FETCHED)
    run(engine)
    assert [block.index for block in engine.exportable()] == [3]


def test_nothing_is_due_twice_nor_when_it_is_gone(make_generation: Make) -> None:
    """A second answer to the same prompt adds only its own blocks; evicted ones are forgotten."""
    engine = engine_with(num_blocks=8)
    engine.add(make_generation("g", PROMPT, max_tokens=1))
    run(engine)
    due = engine.exportable()
    assert len(due) == 4
    engine.add(make_generation("again", PROMPT, max_tokens=1))
    run(engine)
    assert engine.exportable() == []
    engine.add(make_generation("big", [201] * 120, max_tokens=1))
    run(engine)
    assert engine.export(due) == []
    engine.exportable()
    engine.add(make_generation("anew", PROMPT, max_tokens=1))
    run(engine)
    assert len(engine.exportable()) == 4, "computed again, so it is due again"


def test_preempted_blocks_are_due(make_generation: Make) -> None:
    """They may be evicted soon: the next step takes what is still there."""
    engine = engine_with(num_blocks=9, checkpoint_blocks=50)
    for number in range(2):
        prompt = [100 * number + i for i in range(40)]
        engine.add(make_generation(f"g{number}", prompt, max_tokens=60))
    engine.step()
    while not engine.counters.preemptions:
        engine.exportable()
        engine.step()
    due = engine.exportable()
    assert due
    assert [block for block, _ in engine.export(due)] == due
    run(engine)


def test_without_anybody_to_ask_no_blocks_are_named(make_generation: Make) -> None:
    """An engine alone does not even list them, and runs at once."""
    engine = engine_with()
    assert engine.add(make_generation("g", PROMPT)) == Prefix("g", (), 0, len(PROMPT))
    assert engine.has_work


def test_without_checkpoints_nothing_is_collected(make_generation: Make) -> None:
    """An engine without tiers behind it does no work for them."""
    engine = engine_with(checkpoint_blocks=None)
    engine.add(make_generation("g", PROMPT))
    run(engine)
    assert engine.exportable() == []


def test_an_export_that_fails_costs_nothing_but_itself(make_generation: Make) -> None:
    """The runner's fault is counted; the blocks stay."""

    class Broken(ScriptedRunner):
        def export_blocks(self, blocks: list[int]) -> list[bytes]:
            raise RunnerFault("planted")

    runner = Broken(SCRIPTS["babble"], ScriptedSettings(context_tokens=256, max_sequences=4))
    engine = Engine(runner, EngineSettings(num_blocks=50, checkpoint_blocks=2), VirtualClock())
    engine.add(make_generation("g", PROMPT))
    run(engine)
    assert engine.export(engine.exportable()) == []
    assert (engine.counters.failed_exports, engine.counters.exported_blocks) == (1, 0)
    engine.check()


def test_a_step_tells_what_blocks_from_elsewhere_cost(make_generation: Make, saved: Arrivals) -> None:
    """Taking them over and copying them in; not the local block beside them, nor making room for them."""
    clock = VirtualClock()
    engine = engine_with(clock=clock, runner=SlowRunner(clock))
    engine.add(make_generation("local", PROMPT[: BLOCK + 1], max_tokens=1))
    run(engine)
    engine.add(make_generation("g", PROMPT, max_tokens=2), hold_s=100.0)
    engine.supply("g", saved, FETCHED)
    engine.step()
    step = engine.last_step
    assert (step.num_imported_blocks, step.import_s) == (3, 3 * 0.25 + 3 * 1.0)
    assert (step.open_s, step.seconds) == (14.0, 16.0)
    engine.step()
    step = engine.last_step
    assert (step.num_imported_blocks, step.import_s, step.open_s, step.seconds) == (0, 0.0, 0.0, 2.0)


def test_what_was_brought_is_accounted_for_once(make_generation: Make, saved: Arrivals) -> None:
    """Choices that find it in the engine, and a follower, imported nothing."""
    clock = VirtualClock()
    engine = engine_with(clock=clock, runner=SlowRunner(clock))
    engine.add(make_generation("g", PROMPT, n=2, max_tokens=2), hold_s=100.0)
    engine.add(make_generation("follower", PROMPT, max_tokens=2), hold_s=100.0)
    engine.supply("g", saved, FETCHED)
    run(engine)
    assert engine.counters.placed_blocks == engine.counters.imported_blocks == 4
    assert engine.counters.import_s == 4 * 0.25 + 4 * 1.0


def test_what_was_lost_elsewhere_is_due_with_its_chains_next_offer(
    make_generation: Make, saved: Arrivals
) -> None:
    """Computed here or brought: not by itself, only when it is in use; hashes that are not here are fine."""
    engine = engine_with()
    held(engine, make_generation, max_tokens=1)
    engine.supply("g", saved[:2], FETCHED)
    run(engine)
    assert [block.index for block in engine.exportable()] == [2, 3]
    engine.offer_anew([saved[0][0].hash, saved[3][0].hash, b"\0" * 32])
    engine.check()
    assert engine.exportable() == []
    engine.add(make_generation("again", PROMPT, max_tokens=1))
    run(engine)
    assert [block.index for block in engine.exportable()] == [0, 3]
    assert engine.exportable() == []


def test_what_is_due_anyhow_is_due_once(make_generation: Make, saved: Arrivals) -> None:
    """Lost before it was even copied out: nothing changes."""
    engine = engine_with()
    engine.add(make_generation("g", PROMPT, max_tokens=1))
    run(engine)
    engine.offer_anew([block.hash for block, _, _ in saved])
    engine.check()
    engine.add(make_generation("again", PROMPT, max_tokens=1))
    run(engine)
    assert [block.index for block in engine.exportable()] == [0, 1, 2, 3]
