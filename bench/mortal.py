"""A server that may be killed or paused, and comes back each time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.errors import BenchFault
from bench.servers import Command, Server, running

_BACK_S = 60.0


class Mortal:
    """One server, life after life at the same address."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._server: Server | None = None
        self._lives = asyncio.Event()
        self._dies = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def living(cls, command: Command) -> AsyncIterator[Mortal]:
        """Alive when the block begins, gone when it ends. Raises BenchFault if it cannot start."""
        mortal = cls(command)
        task = asyncio.create_task(mortal._live())
        try:
            await mortal._until_alive(task)
            yield mortal
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @property
    def server(self) -> Server:
        """Its latest life. Raises BenchFault before the first."""
        if self._server is None:
            raise BenchFault(f"{self._command.name} is not running")
        return self._server

    async def kill(self) -> None:
        """As kill -9 does; returns when it is back."""
        self._lives.clear()
        self._dies.set()
        async with asyncio.timeout(_BACK_S):
            await self._lives.wait()

    async def pause(self, seconds: float) -> None:
        """As SIGSTOP and, later, SIGCONT do."""
        root = self.server.root
        root.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            root.resume()

    async def _live(self) -> None:
        while True:
            self._dies.clear()
            async with running(self._command, stop=signal.SIGKILL) as server:
                self._server = server
                self._lives.set()
                await self._dies.wait()

    async def _until_alive(self, task: asyncio.Task[None]) -> None:
        waiting = asyncio.create_task(self._lives.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            await task
