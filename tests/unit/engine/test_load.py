"""What an engine tells about its load: a router counts on it."""

from __future__ import annotations

import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, Sampling
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings


@pytest.fixture
def engine() -> Engine:
    """Two sequences at once, 32 tokens a step."""
    runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(max_sequences=2))
    return Engine(runner, EngineSettings(num_blocks=64, token_budget=32), VirtualClock())


def generation(name: str, num_tokens: int, first: int = 65) -> Generation:
    return Generation(
        id=name,
        model="scripted",
        sampling=Sampling(seed=1, max_tokens=8, temperature=0.0),
        token_ids=[first] * num_tokens,
        num_prompt_tokens=num_tokens,
    )


def test_a_prompt_counts_until_it_is_computed(engine: Engine) -> None:
    """While it waits, while it runs in chunks, and not while it is answered."""
    engine.add(generation("g", 97))
    left = [engine.load().waiting_tokens]
    while not engine.load().running or left[-1]:
        engine.step()
        left.append(engine.load().waiting_tokens)
    assert left == [96, 64, 32, 0, 0][: len(left)]
    engine.step()
    assert engine.load().waiting_tokens == 0


def test_what_the_engine_holds_does_not_count(engine: Engine) -> None:
    """A prompt whose beginning is there is as little work as it is."""
    engine.add(generation("a", 65))
    while engine.has_work:
        engine.step()
    engine.add(generation("b", 97))
    assert engine.load().waiting_tokens == 96 - 64


def test_each_choice_counts(engine: Engine) -> None:
    """Until the first has filled blocks for them, all of them are work."""
    engine.add(generation("a", 33))
    engine.add(generation("b", 33, first=66))
    assert engine.load().waiting_tokens == 64
