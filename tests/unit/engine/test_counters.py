"""What a step tells of itself: the seconds that blocks from elsewhere cost."""

from __future__ import annotations

import pytest

from antiphon.core.clock import VirtualClock
from support.twoengines import (
    BLOCK,
    FETCHED,
    PROMPT,
    Arrivals,
    Make,
    SlowRunner,
    engine_with,
    run,
    saved_elsewhere,
)


@pytest.fixture
def saved(make_generation: Make) -> Arrivals:
    """The four blocks of PROMPT, computed by another engine."""
    return saved_elsewhere(make_generation)


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
