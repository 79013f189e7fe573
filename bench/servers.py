"""Server processes under test: started, awaited, measured, and gone at the end whatever happens.

Each server leads a session of its own, so that its whole tree can be ended; it is told to end when the
bench itself dies (Linux), and killed when it does not go in time, or at once where a bench wants that.
Its output goes to a file whose tail is shown when it fails. CPU seconds and memory are those of the
tree, read through psutil.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from bench.errors import BenchFault

_POLL_S = 0.1
_STOP_S = 15.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a server and see that it is ready."""

    name: str
    argv: Sequence[str]
    url: str  # base URL
    ready_path: str  # answers 200 once it can serve
    env: Mapping[str, str] | None = None
    ready_s: float = 120.0
    probe: Callable[[], Awaitable[bool]] | None = None  # whether it can serve, where it speaks no HTTP


@dataclass(frozen=True, slots=True)
class Server:
    """A running server's tree of processes."""

    command: Command
    root: psutil.Process

    @property
    def url(self) -> str:
        return self.command.url

    def cpu_s(self) -> float:
        """CPU seconds of the tree so far, including children that have ended and were waited for."""
        total = 0.0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        with suppress(psutil.NoSuchProcess):
            ended = self.root.cpu_times()
            total += ended.children_user + ended.children_system
        return total

    def rss_bytes(self) -> int:
        """Resident memory of the tree."""
        total = 0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def mapped_files(self, suffix: str) -> list[Path]:
        """Files of this suffix that the tree has mapped into memory: the weights really served."""
        found: set[str] = set()
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                found.update(m.path for m in process.memory_maps() if m.path.endswith(suffix))
        return sorted(Path(path) for path in found)

    def tree(self) -> list[psutil.Process]:
        """The server and its descendants, as of now."""
        try:
            return [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def free_port() -> int:
    """A loopback port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(command: Command, *, stop: signal.Signals = signal.SIGTERM) -> AsyncIterator[Server]:
    """Start the server, wait until it is ready, end its whole tree on exit, with `stop` to begin with.

    Raises BenchFault with the tail of its output if it ends or is not ready in time.
    """
    with tempfile.TemporaryFile() as log:
        process = _start(command, log.fileno())
        server = Server(command, psutil.Process(process.pid))
        try:
            try:
                await _await_ready(command, process)
            except BenchFault as fault:
                raise BenchFault(f"{fault}\n{_tail(log.fileno())}") from None
            yield server
            if process.poll() is not None:
                raise BenchFault(
                    f"{command.name} ended while it was measured, status {process.returncode}"
                    f"\n{_tail(log.fileno())}"
                )
        finally:
            await asyncio.shield(asyncio.to_thread(_end, process, server.tree(), stop))


def _start(command: Command, log: int) -> subprocess.Popen[bytes]:
    """Not in another thread: a child that is to die with its parent dies with the thread that made it."""
    return subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(command.env or {})},
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )


async def _await_ready(command: Command, process: subprocess.Popen[bytes]) -> None:
    async with httpx2.AsyncClient(timeout=2.0, trust_env=False) as http:
        try:
            async with asyncio.timeout(command.ready_s):
                while True:
                    if process.poll() is not None:
                        raise BenchFault(f"{command.name} ended at start, status {process.returncode}")
                    if await _is_ready(command, http):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchFault(f"{command.name} was not ready within {command.ready_s:g} s") from None


async def _is_ready(command: Command, http: httpx2.AsyncClient) -> bool:
    if command.probe is not None:
        return await command.probe()
    with suppress(httpx2.TransportError):
        return (await http.get(command.url + command.ready_path)).status_code == 200
    return False


def _end(process: subprocess.Popen[bytes], tree: list[psutil.Process], stop: signal.Signals) -> None:
    """Ask the server to stop, then kill what is left of its session and tree."""
    with suppress(ProcessLookupError):
        process.send_signal(stop)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in tree:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _tail(fd: int, num_bytes: int = 3000) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, num_bytes, max(0, size - num_bytes)).decode(errors="replace")
