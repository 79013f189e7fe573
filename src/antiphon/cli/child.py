"""A process that is started again when it dies.

Owns the process and the rule for starting it again: at once the first time, then with pauses that
double up to `_PAUSE_MAX_S`. Invariants: cancelling `run` ends the process in order, `kill` at once; a
process that lives without being well is killed, so that it too starts again. Before it was ever ready
a child that ends by itself has said why and is not tried again; one that crashed is tried
`_MAX_CRASHES` times. What runs and how one sees that it works is the `Program`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.25, 30.0
_STEADY_S = 60.0  # a process that lived this long starts again without a pause
_MAX_CRASHES = 3
_HEALTH_EVERY_S, _MAX_MISSED = 2.0, 5
_MAX_LINE_BYTES = 2**20


class StartFailed(Exception):
    """A child could not be started; the text says which and how it ended."""


class Program(Protocol):
    """What runs in a child, one life after the other, and how one sees that it works."""

    @property
    def name(self) -> str: ...

    @property
    def grace_s(self) -> float:
        """Seconds between the request to stop and SIGKILL."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """What its environment has beside ours."""
        ...

    def begin(self) -> Sequence[str]:
        """The command line of a new life."""
        ...

    def hear(self, line: bytes) -> None:
        """A line of its stdout."""
        ...

    async def until_ready(self) -> None:
        """Return once this life works."""
        ...

    async def is_well(self) -> bool:
        """Whether it still does; an answer within seconds."""
        ...

    def last_words(self) -> Sequence[str]:
        """What this life said that explains its end and was not passed on yet."""
        ...


class Child:
    """A program kept running by `run`."""

    def __init__(self, program: Program, say: Callable[[str], None]) -> None:
        self.name = program.name
        self.first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._program = program
        self._say = say
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep the process running until cancelled. Start failures are told to `first_ready`."""
        clock = asyncio.get_running_loop().time
        pause_s = 0.0
        num_crashes = 0
        while True:
            started = clock()
            code = await self._live()
            for line in self._program.last_words():
                self._say(f"{self.name}: {line}")
            if not self.first_ready.done():
                num_crashes += 1
                if code >= 0 or num_crashes == _MAX_CRASHES:
                    text = f"{self.name} could not start ({_ending(code)}); the lines above say more"
                    self.first_ready.set_exception(StartFailed(text))
                    return
            if clock() - started > _STEADY_S:
                pause_s = 0.0
            self._say(f"{self.name} ended ({_ending(code)}); starting it again" + _after(pause_s))
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _PAUSE_MIN_S), _PAUSE_MAX_S)

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _live(self) -> int:
        """One life of the process, from start to end; its exit code, negative for a signal."""
        process = await asyncio.create_subprocess_exec(
            *self._program.begin(),
            env={**os.environ, **self._program.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for `serve`, which stops its children in order
        )
        self._process = process
        watch = asyncio.create_task(self._watch(), name=f"watch {self.name}")
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._program.hear(line)
            return await process.wait()
        finally:
            watch.cancel()
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ask the process to stop, then make it."""
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._program.grace_s)
        except TimeoutError:
            self._say(f"{self.name} did not stop within {self._program.grace_s:g} s; ending it")
            self.kill()
            await process.wait()

    async def _watch(self) -> None:
        """Say when the process is ready; kill it when it stops being well after that."""
        await self._program.until_ready()
        if not self.first_ready.done():
            self.first_ready.set_result(None)
        num_missed = 0
        while num_missed < _MAX_MISSED:
            await asyncio.sleep(_HEALTH_EVERY_S)
            num_missed = 0 if await self._program.is_well() else num_missed + 1
        self._say(f"{self.name} lives but does no work; ending it")
        self.kill()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _after(pause_s: float) -> str:
    return f" in {pause_s:g} s" if pause_s else ""
