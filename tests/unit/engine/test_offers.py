"""Blocks out of an engine: which are offered, and when, and when again."""

from __future__ import annotations

import pytest

from antiphon.core.clock import VirtualClock
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import RunnerFault
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings
from support.twoengines import (
    FETCHED,
    PROMPT,
    Arrivals,
    Make,
    engine_with,
    held,
    run,
    saved_elsewhere,
)


@pytest.fixture
def saved(make_generation: Make) -> Arrivals:
    """The four blocks of PROMPT, computed by another engine."""
    return saved_elsewhere(make_generation)


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
