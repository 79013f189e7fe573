"""A process of ours that is started again when it dies.

Owns the process, its port and the rule for starting it again: at once the first time, then with
pauses that double up to `_PAUSE_MAX_S`, so that a gateway finds it under its old address. Invariants:
cancelling `run` ends the process in order, `kill` at once; a process that lives without answering its
health check is killed, so that it too starts again. Before it was ever ready a child that ends by
itself has said why and is not tried again; one that crashed is tried `_MAX_CRASHES` times.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.cli.events import Progress, Ready, read
from antiphon.cli.options import LOOPBACK, base_url, reachable

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.25, 30.0
_STEADY_S = 60.0  # a process that lived this long starts again without a pause
_MAX_CRASHES = 3
_HEALTH_EVERY_S, _HEALTH_TIMEOUT_S, _MAX_MISSED = 2.0, 5.0, 5
_MAX_LINE_BYTES = 2**20


class StartFailed(Exception):
    """A child could not be started; the text says which and how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """How a child is run. `command` gets --host, --port and --supervised added."""

    name: str
    command: Sequence[str]
    host: str = LOOPBACK
    port: int = 0  # 0: any free one, kept over restarts
    health_path: str
    grace_s: float  # between the request to stop and SIGKILL


class Child:
    """One process, kept running by `run`."""

    def __init__(
        self,
        settings: ChildSettings,
        on_progress: Callable[[str, Progress], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = settings.name
        self.port = settings.port
        self.first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._on_progress = on_progress
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False

    @property
    def url(self) -> str:
        """Where this machine reaches it; its port is known once it was ready."""
        return base_url(self._settings.host, self.port)

    async def run(self) -> None:
        """Keep the process running until cancelled. Start failures are told to `first_ready`."""
        clock = asyncio.get_running_loop().time
        pause_s = 0.0
        num_crashes = 0
        while True:
            started = clock()
            code = await self._live()
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
            *self._settings.command,
            *("--host", self._settings.host, "--port", str(self.port), "--supervised"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for `serve`, which stops its children in order
        )
        self._process = process
        watch = asyncio.create_task(self._watch_health(), name=f"health {self.name}")
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                self._hear(line)
            return await process.wait()
        finally:
            watch.cancel()
            self._is_ready = False
            await self._end(process)

    def _hear(self, line: bytes) -> None:
        match read(line):
            case Progress() as progress:
                self._on_progress(self.name, progress)
            case Ready(port=port):
                self.port = port
                self._is_ready = True
                if not self.first_ready.done():
                    self.first_ready.set_result(None)
            case None:
                self._say(f"{self.name}: {line.decode(errors='replace').rstrip()}")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ask the process to stop, then make it."""
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._settings.grace_s)
        except TimeoutError:
            self._say(f"{self.name} did not stop within {self._settings.grace_s:g} s; ending it")
            self.kill()
            await process.wait()

    async def _watch_health(self) -> None:
        """Kill the process when it was ready and stops answering."""
        num_missed = 0
        while num_missed < _MAX_MISSED:
            await asyncio.sleep(_HEALTH_EVERY_S)
            if not self._is_ready:
                continue
            body = await fetch(self._settings.host, self.port, self._settings.health_path)
            num_missed = num_missed + 1 if body is None else 0
        self._say(f"{self.name} lives but does no work; ending it")
        self.kill()


async def fetch(host: str, port: int, path: str) -> bytes | None:
    """The body of a GET to the server that listens there; None unless it says 200."""
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(reachable(host), port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                return body if head.split(b" ")[1:2] == [b"200"] else None
            finally:
                writer.close()
    except OSError:
        return None


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _after(pause_s: float) -> str:
    return f" in {pause_s:g} s" if pause_s else ""
