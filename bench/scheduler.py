"""`bench scheduler`: what the engine itself costs a step, without the model, as the batch grows.

Cost: wall time of `Engine.step` less the time inside `runner.run`, so scheduling, block accounting,
greedy choice over a 258-word vocabulary and outputs. It must not grow faster than the batch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from antiphon.core.clock import WallClock
from antiphon.core.generation import Generation, Sampling
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import Chunk, Logits
from antiphon.engine.scripted import ScriptedRunner, ScriptedSettings, babble
from bench.errors import BenchFault
from bench.load import median
from bench.machine import describe
from bench.pairs import progress
from bench.report import Run, figure, rounded, today

_BATCHES = (1, 16, 128)
_PROMPT_TOKENS = 100
_WARM_STEPS = 200  # all prompts are computed by then


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    num_rounds: int = 9
    num_steps: int = 200

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_rounds=3, num_steps=100)


class TimedRunner(ScriptedRunner):
    """A scripted runner that adds up the time spent in it."""

    def __init__(self, num_sequences: int) -> None:
        super().__init__(babble, ScriptedSettings(max_sequences=num_sequences, context_tokens=8192))
        self.spent_s = 0.0

    def run(self, chunks: list[Chunk]) -> Logits:
        started_s = time.perf_counter()
        logits = super().run(chunks)
        self.spent_s += time.perf_counter() - started_s
        return logits


def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure all batch sizes in turns."""
    costs: dict[int, list[float]] = {batch: [] for batch in _BATCHES}
    for number in range(settings.num_rounds):
        progress(f"round {number + 1} of {settings.num_rounds}")
        for batch in _BATCHES:
            costs[batch].append(step_cost_s(batch, settings.num_steps))
    lone, some, many = (costs[batch] for batch in _BATCHES)
    return Run(
        bench="scheduler",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=[
            figure(
                "cost_128_of_16",
                median([m / s for m, s in zip(many, some, strict=True)]),
                "engine's own time a step, 128 sequences ÷ 16 sequences",
                "<= 8.0",
            ),
            figure(
                "cost_16_of_1",
                median([s / one for s, one in zip(some, lone, strict=True)]),
                "engine's own time a step, 16 sequences ÷ 1 sequence",
                "<= 16.0",
            ),
        ],
        raw={
            f"{batch} sequences": {
                "µs a step": rounded(1e6 * median(costs[batch])),
                "µs a sequence": rounded(1e6 * median(costs[batch]) / batch),
            }
            for batch in _BATCHES
        },
    )


def step_cost_s(num_sequences: int, num_steps: int) -> float:
    """Median seconds of one decode step of this many sequences, the runner's own time left out."""
    runner = TimedRunner(num_sequences)
    num_blocks = num_sequences * ((_PROMPT_TOKENS + _WARM_STEPS + num_steps) // runner.block_tokens + 2)
    engine = Engine(runner, EngineSettings(num_blocks=num_blocks), WallClock())
    for number in range(num_sequences):
        prompt = list(number.to_bytes(2, "little")) + [97] * (_PROMPT_TOKENS - 2)
        sampling = Sampling(seed=number, max_tokens=_WARM_STEPS + num_steps, temperature=0.0)
        engine.add(
            Generation(
                id=str(number),
                model="scripted",
                sampling=sampling,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
            )
        )
    for _ in range(_WARM_STEPS):
        engine.step()
    if engine.last_step.num_tokens != num_sequences:
        raise BenchFault(f"a step of {num_sequences} decodes computed {engine.last_step.num_tokens} tokens")
    costs = []
    for _ in range(num_steps):
        inside_s, started_s = runner.spent_s, time.perf_counter()
        engine.step()
        costs.append(time.perf_counter() - started_s - (runner.spent_s - inside_s))
    return median(costs)
