"""Loopback workers that compute: a real engine on the `noise` script, told when to die.

Each generation runs in an engine of its own, step by step, a frame a step, so that a test decides
between which two tokens its worker is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, Sampling, StepOutput
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import END_ID, SCRIPTS, ScriptedRunner, ScriptedSettings
from antiphon.router.answer import Answer, Reader
from support.loopback import Script, Session

SAMPLING = Sampling(
    seed=11,
    max_tokens=40,
    temperature=1.0,
    top_p=0.95,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    logprobs=2,
    min_tokens=10,
    stop_ids=(END_ID,),
)


def make_generation(n: int = 1, sampling: Sampling = SAMPLING, name: str = "g") -> Generation:
    return Generation(
        id=name,
        model="scripted",
        sampling=sampling,
        token_ids=list(b"Once upon a time"),
        num_prompt_tokens=16,
        n=n,
        timeout_s=60.0,
    )


def undisturbed(generation: Generation) -> list[list[object]]:
    """What each choice is when nothing happens."""
    made = engine()
    made.add(generation)
    outputs: list[StepOutput] = []
    while made.has_work:
        outputs += made.step()
    return [said(outputs, choice) for choice in range(generation.n)]


def said(outputs: list[StepOutput], choice: int) -> list[object]:
    """Ids with their log probabilities and the end of one choice, however they were grouped."""
    mine = [output for output in outputs if output.choice == choice]
    tokens: list[object] = [pair for o in mine for pair in zip(o.ids, o.logprobs or (), strict=True)]
    return [*tokens, *(o.finish for o in mine if o.finish is not None)]


async def outputs_of(answer: Answer) -> list[StepOutput]:
    """Everything an answer said, once it has ended."""
    reader = Reader([answer], idle_s=60)
    found: list[StepOutput] = []
    async with asyncio.timeout(20):
        while (events := await reader.read()) is not None:
            found += [output for _, output in events]
    reader.close()
    return found


Fault = Callable[[Session], Awaitable[None]]


def engine() -> Engine:
    """An engine whose text depends on its KV."""
    runner = ScriptedRunner(SCRIPTS["noise"], ScriptedSettings(block_tokens=4))
    return Engine(runner, EngineSettings(num_blocks=256), VirtualClock())


def computing(fault: Fault | None = None, after_tokens: int = 0) -> Script:
    """Computes; with `fault`, that happens to each generation after so many tokens of all its choices."""

    async def script(session: Session, generation: Generation) -> None:
        made = engine()
        made.add(generation)
        num_tokens = 0
        while made.has_work:
            outputs: list[StepOutput] = []
            for output in made.step():
                num_tokens += len(output.ids)
                if fault is not None and num_tokens > after_tokens:
                    await session.send(*outputs)
                    await fault(session)
                    return
                outputs.append(output)
            await session.send(*outputs)
            await asyncio.sleep(0)

    return script


async def dies(session: Session) -> None:
    """As by kill -9."""
    await session.close()


async def freezes(session: Session) -> None:
    """As by SIGSTOP, but for its heartbeats."""
    await asyncio.Event().wait()


def dies_of(poison: bytes, after_tokens: int) -> Script:
    """Computes, but a prompt with these bytes kills it where its answer has so many tokens."""

    async def script(session: Session, generation: Generation) -> None:
        prompt = bytes(generation.token_ids[: generation.num_prompt_tokens])
        num_received = len(generation.token_ids) - generation.num_prompt_tokens
        if poison in prompt:
            await computing(dies, max(0, after_tokens - num_received))(session, generation)
        else:
            await computing()(session, generation)

    return script
