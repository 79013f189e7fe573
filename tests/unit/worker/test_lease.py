"""A worker keeps its lease, whatever Redis does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from antiphon.core.lease import Lease
from antiphon.kv import redisurl
from antiphon.kv.keys import WORKERS_KEY, lease_key
from antiphon.obs.metrics import WorkerMetrics
from antiphon.worker import lease as module
from antiphon.worker.lease import LeaseKeeper, LeaseSettings, leased
from support.leasing import lease, leases_at
from support.lines import Lines
from support.loopback import SECRET
from support.redisserver import RedisServer, redis_server

SAID = lease("http://h:8100")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One server on loopback."""
    with redis_server() as running:
        yield running


class Engine:
    """What the lease tells of."""

    def __init__(self) -> None:
        self.stands = False
        self.is_draining = False
        self.num_asked = 0
        self.asked = asyncio.Event()

    def describe(self, worker_id: str) -> Lease | None:
        self.num_asked += 1
        self.asked.set()
        load = msgspec.structs.replace(SAID.load, draining=self.is_draining)
        return None if self.stands else msgspec.structs.replace(SAID, id=worker_id, load=load)

    async def next_beat(self) -> None:
        self.asked.clear()
        async with asyncio.timeout(10):
            await self.asked.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat takes no seconds here."""
    monkeypatch.setattr(module, "BEAT_S", 0.02)


@contextlib.asynccontextmanager
async def keeping(
    url: str, engine: Engine, lines: Lines, metrics: WorkerMetrics | None = None
) -> AsyncIterator[LeaseKeeper]:
    """A lease is held in the block."""
    settings = LeaseSettings(redisurl.parse(url))
    held = leased(settings, SECRET, engine.describe, metrics or WorkerMetrics(), lines.logger())
    async with held as keeper:
        yield keeper


async def test_lease_is_there_while_the_worker_is(server: RedisServer) -> None:
    """Gateways find address and model; after the end Redis is as it was."""
    lines = Lines()
    async with keeping(server.url, Engine(), lines) as keeper, leases_at(server.url) as leases:
        await lines.until("lease.held")
        assert await leases.ids() == [keeper.worker_id]
        found = (await leases.read([keeper.worker_id]))[keeper.worker_id]
        assert found is not None
        assert isinstance(found.lease, Lease)
        assert found.lease.address == SAID.address
    with server.client() as client:
        assert client.dbsize() == 0


async def test_news_does_not_wait_for_a_beat(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain is told at once."""
    monkeypatch.setattr(module, "BEAT_S", 1000.0)
    lines, engine = Lines(), Engine()
    async with keeping(server.url, engine, lines) as keeper, leases_at(server.url) as leases:
        await lines.until("lease.held")
        engine.is_draining = True
        keeper.renew_now()
        async with asyncio.timeout(10):
            while True:
                found = (await leases.read([keeper.worker_id]))[keeper.worker_id]
                if found is not None and isinstance(found.lease, Lease) and found.lease.load.draining:
                    break


async def test_end_right_after_news_is_an_end(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without answers drains in no time: its last beat is cancelled, and the lease is gone."""
    monkeypatch.setattr(module, "BEAT_S", 1000.0)
    for num_turns in range(12):
        lines = Lines()
        async with keeping(server.url, Engine(), lines) as keeper:
            await lines.until("lease.held")
            keeper.renew_now()
            for _ in range(num_turns):
                await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "lease"]
        with server.client() as client:
            assert client.dbsize() == 0


async def test_engine_that_stands_still_lets_the_lease_end(server: RedisServer) -> None:
    """No beat for what makes no progress; when it goes on, so do the beats."""
    lines, engine = Lines(), Engine()
    async with keeping(server.url, engine, lines) as keeper:
        await lines.until("lease.held")
        engine.stands = True
        await engine.next_beat()
        with server.client() as client:
            client.delete(lease_key(keeper.worker_id))
            for _ in range(3):
                await engine.next_beat()
            assert not client.exists(lease_key(keeper.worker_id))
            engine.stands = False
            for _ in range(3):
                await engine.next_beat()
            assert client.exists(lease_key(keeper.worker_id))


async def test_redis_lost_and_back_is_two_lines_and_two_counters(server: RedisServer) -> None:
    """However long it is away; afterwards, empty as it is, it has the lease again."""
    lines, engine, metrics = Lines(), Engine(), WorkerMetrics()
    async with keeping(server.url, engine, lines, metrics) as keeper:
        await lines.until("lease.held")
        server.kill()
        await lines.until("lease.lost")
        for _ in range(5):
            await engine.next_beat()
        server.start()
        await lines.until("lease.held", 2)
        with server.client() as client:
            assert client.smembers(WORKERS_KEY) == {keeper.worker_id.encode()}
    assert len(lines.named("lease.lost")) == 1
    page = metrics.render().decode()
    for outcome in ("done", "failed"):
        assert f'antiphon_lease_renewals_total{{outcome="{outcome}"}}' in page


async def test_worker_ends_though_redis_hangs(server: RedisServer) -> None:
    """A stopped server costs the end its deadline; the lease will run out by itself."""
    lines = Lines()
    try:
        async with keeping(server.url, Engine(), lines):
            await lines.until("lease.held")
            server.pause()
        assert lines.named("lease.left")
    finally:
        server.resume()
