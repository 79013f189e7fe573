"""Loopback workers that compute: a real engine on the `noise` script, told when to die.

Each generation runs in an engine of its own, step by step, a frame a step, so that a test decides
between which two tokens its worker is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, StepOutput
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings
from support.loopback import Script, Session

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
