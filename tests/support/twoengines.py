"""Engines on scripted runners that stand for workers: a payload goes from one to the other as bytes."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, KvReport, StepOutput
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import Chunk, Logits
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
    """Room for `num_blocks`, 32 tokens a step."""
    runner = runner or ScriptedRunner(SCRIPTS["babble"], RUNNER)
    settings = EngineSettings(
        num_blocks=num_blocks, namespace=b"n", checkpoint_blocks=checkpoint_blocks, token_budget=32
    )
    return Engine(runner, settings, clock or VirtualClock())


def run(engine: Engine) -> list[StepOutput]:
    """Step until nothing is left."""
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.check()
    return outputs


def ids(outputs: list[StepOutput]) -> list[int]:
    """The tokens of an answer."""
    return [i for output in outputs for i in output.ids]


def held(engine: Engine, make_generation: Make, name: str = "g", **options: object) -> Prefix:
    """A generation that waits for its blocks."""
    prefix = engine.add(make_generation(name, PROMPT, **options), hold_s=1.0)
    assert engine.is_held(name)
    return prefix


def saved_elsewhere(make_generation: Make) -> Arrivals:
    """The four blocks of PROMPT, computed by another engine."""
    other = engine_with()
    other.add(make_generation("x", PROMPT, max_tokens=1))
    run(other)
    return [(block, payload, Tier.STORE) for block, payload in other.export(other.exportable())]
