"""A Redis (or Valkey) of the bench's own, as the product wants one for KV blocks."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.errors import BenchFault
from bench.servers import Command, Server, running

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Eviction:
    """What a full server throws away, and how many keys it compares for it."""

    policy: str = "volatile-ttl"
    samples: int = 64


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A running server on a unix socket."""

    server: Server
    socket: Path

    @property
    def url(self) -> str:
        return self.server.url

    def num_keys(self) -> int:
        """Keys now there."""
        with _client(self.socket) as client:
            return int(client.dbsize())

    def keys(self) -> set[str]:
        """All of them."""
        with _client(self.socket) as client:
            return {key.decode() for key in client.keys("*")}

    def used_bytes(self) -> int:
        """Memory that data takes."""
        with _client(self.socket) as client:
            return int(client.info("memory")["used_memory"])


@asynccontextmanager
async def redis_server(maxmemory_mib: int, eviction: Eviction = Eviction()) -> AsyncIterator[RedisServer]:
    """An empty server that evicts and never writes to disk. Raises BenchFault where none is installed."""
    with TemporaryDirectory(prefix="antiphon-bench-") as name:
        socket = Path(name) / "redis.sock"

        async def answers() -> bool:
            try:
                with _client(socket) as client:
                    return bool(client.ping())
            except redis.ConnectionError:
                return False

        argv = [binary(), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
        argv += ["--dir", name, "--save", "", "--appendonly", "no"]
        argv += ["--maxmemory", f"{maxmemory_mib}mb", "--maxmemory-policy", eviction.policy]
        argv += ["--maxmemory-samples", str(eviction.samples)]
        command = Command("redis-server", argv, f"unix://{socket}", "", probe=answers)
        async with running(command) as server:
            yield RedisServer(server, socket)


def binary() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise BenchFault("there is no redis-server: apt-get install redis-server")
    return found


def _client(socket: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0))
