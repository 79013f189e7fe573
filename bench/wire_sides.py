"""Clients that `bench kv-wire` measures: our store, redis-py in each of its modes, redis-benchmark.

Every Python client keeps the values of a run until its end, as a fetch does, and checks how many came.
"""

from __future__ import annotations

import asyncio
import csv
import io
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import redis
import redis.asyncio
import redis.asyncio.retry
from redis._parsers import Encoder, _RESP2Parser
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from antiphon.kv.redisstore import open_store
from bench.errors import BenchFault

TTL_MS = 600_000
_TIMEOUT_S = 20.0
_RUN_KEYS = 8  # values that are held at once
_CUTOFF_BYTES = 6000  # redis-py's own


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens: a port of this machine, or else a socket."""

    port: int = 0
    socket: str = ""

    @property
    def url(self) -> str:
        return f"unix://{self.socket}" if self.socket else f"redis://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, object]:
        """For redis-py."""
        if self.socket:
            return {"unix_socket_path": self.socket}
        return {"host": "127.0.0.1", "port": self.port}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one client."""

    gb_s: float
    cpu_s_gb: float  # of the client alone


class Side(Protocol):
    """A client in one of its modes."""

    name: str

    async def get(self, keys: Sequence[str]) -> int:
        """Get all values; their bytes."""
        ...

    async def put(self, keys: Sequence[str], value: bytes) -> None:
        """Store the value under all keys, none of which is there."""
        ...

    async def close(self) -> None: ...


async def sample(side: Side, keys: Sequence[str], value: bytes, *, put: bool) -> Sample:
    """Run it once. Raises BenchFault where a value is missing."""
    num_bytes = len(keys) * len(value)
    cpu_s, started_s = time.process_time(), time.perf_counter()
    if put:
        await side.put(keys, value)
    elif await side.get(keys) != num_bytes:
        raise BenchFault(f"{side.name} did not get all values")
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return Sample(num_bytes / wall_s / 1e9, cpu_s / (num_bytes / 1e9))


def runs_of(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Keys that are read at once."""
    for first in range(0, len(keys), _RUN_KEYS):
        yield keys[first : first + _RUN_KEYS]


class Ours:
    """Our store, called by so many threads."""

    def __init__(self, place: Place, num_threads: int = 1) -> None:
        self.name = f"ours, {num_threads} thread{'s' if num_threads > 1 else ''}"
        self._store = open_store(place.url)
        self._threads = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads

    async def get(self, keys: Sequence[str]) -> int:
        return sum(self._spread(keys, self._get))

    async def put(self, keys: Sequence[str], value: bytes) -> None:
        self._spread(keys, lambda part: self._put(part, value))

    async def close(self) -> None:
        self._threads.shutdown()
        self._store.close()

    def _get(self, keys: Sequence[str]) -> int:
        num_bytes = 0
        for run in runs_of(keys):
            got = self._store.get_run(run, _TIMEOUT_S)
            if got.fault is not None:
                raise BenchFault(str(got.fault))
            num_bytes += got.num_bytes
        return num_bytes

    def _put(self, keys: Sequence[str], value: bytes) -> int:
        return sum(self._store.put(key, value, TTL_MS, _TIMEOUT_S) for key in keys)

    def _spread(self, keys: Sequence[str], work: Callable[[Sequence[str]], int]) -> list[int]:
        if self._num_threads == 1:
            return [work(keys)]
        return list(self._threads.map(work, [keys[n :: self._num_threads] for n in range(self._num_threads)]))


@dataclass(frozen=True, slots=True)
class Mode:
    """How redis-py is used. `batch`: keys a pipeline or MGET; 0: one by one."""

    name: str
    num_threads: int = 1
    is_hiredis: bool = True
    read_bytes: int = 32768  # redis-py's own choice
    batch: int = 0
    is_mget: bool = False


MODES = (
    Mode("redis-py, 1 thread"),
    Mode("redis-py, 2 threads", num_threads=2),
    Mode("redis-py, 4 threads", num_threads=4),
    Mode("redis-py, 1 thread, reads of 1 MiB", read_bytes=2**20),
    Mode("redis-py, 2 threads, reads of 1 MiB", num_threads=2, read_bytes=2**20),
    Mode("redis-py without hiredis, 1 thread", is_hiredis=False, read_bytes=2**20),
    Mode("redis-py without hiredis, 2 threads", num_threads=2, is_hiredis=False, read_bytes=2**20),
    Mode("redis-py, pipelines of 8", batch=8),
    Mode("redis-py, MGET of 8", batch=8, is_mget=True),
)


class RedisPy:
    """redis-py's blocking client."""

    def __init__(self, place: Place, mode: Mode) -> None:
        self.name = mode.name
        self._mode = mode
        self._threads = ThreadPoolExecutor(mode.num_threads)
        self._clients = [_client(place, mode) for _ in range(mode.num_threads)]

    async def get(self, keys: Sequence[str]) -> int:
        return sum(self._spread(keys, self._get))

    async def put(self, keys: Sequence[str], value: bytes) -> None:
        self._spread(keys, lambda client, part: self._put(client, part, value))

    async def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def _spread(self, keys: Sequence[str], work: Callable[[redis.Redis, Sequence[str]], int]) -> list[int]:
        count = len(self._clients)
        if count == 1:
            return [work(self._clients[0], keys)]
        return list(self._threads.map(work, self._clients, [keys[n::count] for n in range(count)]))

    def _get(self, client: redis.Redis, keys: Sequence[str]) -> int:
        num_bytes = 0
        for run in runs_of(keys):
            if self._mode.is_mget:
                values = client.mget(run)
            elif self._mode.batch:
                pipeline = client.pipeline(transaction=False)
                for key in run:
                    pipeline.get(key)
                values = pipeline.execute()
            else:
                values = [client.get(key) for key in run]
            num_bytes += sum(map(len, values))
        return num_bytes

    def _put(self, client: redis.Redis, keys: Sequence[str], value: bytes) -> int:
        if not self._mode.batch:
            return sum(bool(client.set(key, value, px=TTL_MS, nx=True)) for key in keys)
        num_put = 0
        for run in runs_of(keys):
            pipeline = client.pipeline(transaction=False)
            for key in run:
                pipeline.set(key, value, px=TTL_MS, nx=True)
            num_put += len(pipeline.execute())
        return num_put


class RedisPyAsync:
    """redis-py's asyncio client, with so many requests at a time."""

    def __init__(self, place: Place, num_tasks: int) -> None:
        self.name = f"redis-py asyncio, {num_tasks} at a time"
        self._clients = [
            redis.asyncio.Redis(
                **place.options,
                socket_timeout=_TIMEOUT_S,
                retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
                single_connection_client=True,
            )
            for _ in range(num_tasks)
        ]

    async def get(self, keys: Sequence[str]) -> int:
        async def work(client: redis.asyncio.Redis, part: Sequence[str]) -> int:
            num_bytes = 0
            for run in runs_of(part):
                num_bytes += sum(map(len, [await client.get(key) for key in run]))
            return num_bytes

        count = len(self._clients)
        return sum(await asyncio.gather(*(work(c, keys[n::count]) for n, c in enumerate(self._clients))))

    async def put(self, keys: Sequence[str], value: bytes) -> None:
        async def work(client: redis.asyncio.Redis, part: Sequence[str]) -> None:
            for key in part:
                await client.set(key, value, px=TTL_MS, nx=True)

        count = len(self._clients)
        await asyncio.gather(*(work(c, keys[n::count]) for n, c in enumerate(self._clients)))

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _client(place: Place, mode: Mode) -> redis.Redis:
    options: dict[str, object] = {"socket_timeout": _TIMEOUT_S, "socket_read_size": mode.read_bytes}
    options["retry"] = Retry(NoBackoff(), 0)
    if mode.is_hiredis:
        return redis.Redis(**place.options, **options)
    options |= {"path": place.socket} if place.socket else place.options
    pool = redis.ConnectionPool(
        redis.UnixDomainSocketConnection if place.socket else redis.Connection,
        parser_class=_RESP2Parser,
        command_packer=PythonRespSerializer(_CUTOFF_BYTES, Encoder("utf-8", "strict", False).encode),
        protocol=2,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        **options,
    )
    return redis.Redis.from_pool(pool)


@dataclass(slots=True)
class RedisBenchmark:
    """redis-benchmark: the binary beside the server, with so many connections."""

    place: Place
    num_clients: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"redis-benchmark, -c {self.num_clients}"

    def sample(self, num_keys: int, value_bytes: int, *, put: bool, num_requests: int) -> Sample:
        """GETs go to `num_keys` keys named key:000000000000 and up; SETs to ever new ones."""
        argv = [_benchmark_binary(), "--csv", "-d", str(value_bytes), "-n", str(num_requests)]
        argv += ["-c", str(self.num_clients), "-t", "set" if put else "get"]
        argv += ["-r", str(10**11 if put else num_keys)]
        argv += ["-s", self.place.socket] if self.place.socket else ["-p", str(self.place.port)]
        cpu_s = _children_cpu_s()
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        cpu_s = _children_cpu_s() - cpu_s
        num_gb = num_requests * value_bytes / 1e9
        with suppress(StopIteration, KeyError, ValueError):
            row = next(csv.DictReader(io.StringIO(done.stdout)))
            return Sample(float(row["rps"]) * value_bytes / 1e9, cpu_s / num_gb)
        raise BenchFault(f"redis-benchmark said: {done.stdout or done.stderr}")


def _children_cpu_s() -> float:
    """Of children that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _benchmark_binary() -> str:
    binary = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    if binary is None:
        raise BenchFault("there is no redis-benchmark: apt-get install redis-tools")
    return binary


def benchmark_key(number: int) -> str:
    """The key redis-benchmark asks for."""
    return f"key:{number:012}"
