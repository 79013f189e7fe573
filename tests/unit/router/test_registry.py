"""A gateway's registry between a real Redis, which misbehaves, and workers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest

from antiphon.core.clock import WallClock
from antiphon.core.lease import MAX_LEASE_BYTES
from antiphon.kv.keys import WORKERS_KEY, lease_key
from antiphon.kv.leases import Leases
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router import members, registry
from antiphon.router.dispatch import Dispatcher
from antiphon.router.fleet import Fleet
from antiphon.router.registry import Registry
from support.dispatchers import until
from support.leasing import lease, leases_at
from support.lines import Lines
from support.loopback import SECRET, LoopbackWorker, saying, worker_info
from support.redisserver import RedisServer, redis_cluster, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One server on loopback."""
    with redis_server() as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read takes no second here, and nobody waits six for a worker that is gone."""
    monkeypatch.setattr(registry, "READ_EVERY_S", 0.02)
    monkeypatch.setattr(members, "GONE_AFTER_S", 0.1)


@dataclass
class Reading:
    """A registry that runs, and what it writes to."""

    fleet: Fleet
    metrics: GatewayMetrics
    lines: Lines

    def up(self, model: str = "scripted") -> list[str]:
        """Addresses of workers that can be used."""
        return [link.url for link in self.fleet.serving(model)]

    def figure(self, name: str) -> float:
        """A metric, by its name and labels."""
        page = self.metrics.render().decode()
        return sum(
            float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name} ")
        )

    async def reads(self, num_reads: int, outcome: str = "done") -> None:
        """So many more of them."""
        name = f'antiphon_registry_reads_total{{outcome="{outcome}"}}'
        wanted = self.figure(name) + num_reads
        await until(lambda: self.figure(name) >= wanted)


@contextlib.asynccontextmanager
async def reading(url: str, *static: str, offers: Sequence[str] = ("scripted",)) -> AsyncIterator[Reading]:
    """A gateway's fleet, which follows the leases in this Redis."""
    lines, metrics = Lines(), GatewayMetrics()
    dispatcher = Dispatcher(static, SECRET, lines.logger())
    fleet = dispatcher.fleet
    async with leases_at(url) as leases:
        made = Registry(leases, fleet, offers.__contains__, metrics.registry, WallClock(), lines.logger())
        tasks = [asyncio.create_task(dispatcher.run()), asyncio.create_task(made.run())]
        try:
            yield Reading(fleet, metrics, lines)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def beating(leases: Leases, *workers: LoopbackWorker) -> AsyncIterator[list[str]]:
    """These workers hold leases; their ids."""
    held = [lease(worker.url, worker.info.model) for worker in workers]

    async def beat() -> None:
        while True:
            with contextlib.suppress(Exception):
                for one in held:
                    await leases.renew(one)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(beat())
    try:
        yield [one.id for one in held]
    finally:
        task.cancel()
        await asyncio.wait([task])


def worker(model: str = "scripted") -> LoopbackWorker:
    return LoopbackWorker(saying(b"hi"), worker_info(model))


async def test_worker_with_a_lease_is_linked_and_one_that_ends_is_dropped(server: RedisServer) -> None:
    """Joining takes a read; leaving, a while without lease and link. Its id is forgotten in Redis."""
    async with reading(server.url) as gateway, leases_at(server.url) as leases:
        async with worker().running() as one:
            mine = lease(one.url)
            await leases.renew(mine)
            await until(lambda: len(gateway.up()) == 1)
            await until(lambda: gateway.figure("antiphon_registry_workers") == 1)
        with server.client() as client:
            client.delete(lease_key(mine.id))
            await until(lambda: gateway.fleet.links == [])
            assert client.smembers(WORKERS_KEY) == set()
        assert [line["worker"] for line in gateway.lines.named("worker.gone")]


async def test_redis_that_comes_back_empty_takes_nobody_away(server: RedisServer) -> None:
    """FLUSHALL, for longer than workers are waited for: links are proof enough."""
    async with worker().running() as one, reading(server.url) as gateway, leases_at(server.url) as leases:
        await leases.renew(lease(one.url))
        await until(lambda: len(gateway.up()) == 1)
        with server.client() as client:
            client.flushall()
        await gateway.reads(20)
        assert len(gateway.up()) == 1
        assert gateway.figure("antiphon_registry_workers") == 0


@contextlib.contextmanager
def lost(server: RedisServer, fault: str) -> Iterator[None]:
    """Redis cannot be used in the block."""
    if fault == "killed":
        server.kill()
        yield
        server.start()
    elif fault == "stopped":
        server.pause()
        try:
            yield
        finally:
            server.resume()
    else:
        with server.client() as client:
            client.client_pause(2500)  # it would not hear CLIENT UNPAUSE
        yield


@pytest.mark.parametrize("fault", ["killed", "stopped", "paused"])
async def test_redis_lost_changes_nothing_but_the_news(server: RedisServer, fault: str) -> None:
    """Refused, silent or late: links stay and come back by themselves, its age grows, one line says so."""
    one, two = worker(), worker()
    async with reading(server.url) as gateway, leases_at(server.url) as leases, two.running():
        async with one.running():
            await leases.renew(lease(one.url))
            await leases.renew(lease(two.url))
            await until(lambda: len(gateway.up()) == 2)
        await until(lambda: len(gateway.up()) == 1)
        with lost(server, fault):
            await gateway.reads(1, "failed")
            before = gateway.figure("antiphon_registry_age_seconds")
            await gateway.reads(1, "failed")
            assert gateway.figure("antiphon_registry_age_seconds") > before
            async with one.running():  # a worker restarts meanwhile: its link was not given up
                await until(lambda: len(gateway.up()) == 2)
        async with one.running():
            await gateway.reads(2)
            await until(lambda: len(gateway.up()) == 2)
        assert len(gateway.lines.named("registry.lost")) == 1
        assert len(gateway.lines.named("registry.read")) == 2


async def test_slow_redis_holds_up_nobody(server: RedisServer) -> None:
    """While a read hangs, the loop is free: what the gateway does beside it is done thousands of times."""
    async with worker().running() as one, reading(server.url, one.url) as gateway:
        await gateway.reads(1)
        server.pause()
        try:
            num_turns = 0
            failed = asyncio.create_task(gateway.reads(1, "failed"))
            while not failed.done():
                await asyncio.sleep(0)
                num_turns += 1
            await failed
        finally:
            server.resume()
        assert num_turns > 100
        assert gateway.up()


async def test_gateway_that_starts_without_redis_has_its_static_list() -> None:
    """And finds the others when Redis comes."""
    with redis_server() as server:
        server.kill()
        async with (
            worker().running() as one,
            worker().running() as two,
            reading(server.url, one.url) as gateway,
            leases_at(server.url) as leases,
        ):
            await until(lambda: len(gateway.up()) == 1)
            await gateway.lines.until("registry.lost")
            server.start()
            async with beating(leases, one, two):
                await until(lambda: len(gateway.up()) == 2)


async def test_forged_lease_leads_nowhere(server: RedisServer) -> None:
    """Who can write to Redis cannot make a gateway call him: no connection, a counter, one line."""
    async with worker().running() as trap, reading(server.url) as gateway:
        async with (
            leases_at(server.url, "a guess at the secret of all") as forger,
            leases_at(server.url) as good,
        ):
            true = lease("http://127.0.0.1:9")
            await good.renew(true)
            forged = lease(trap.url)
            await forger.renew(forged)
            with server.client() as client:
                copied = lease(trap.url)  # a true lease under another id
                client.set(lease_key(copied.id), client.get(lease_key(true.id)))
                client.sadd(WORKERS_KEY, copied.id)
            refused = 'antiphon_leases_refused_total{reason="forged"}'
            await until(lambda: gateway.figure(refused) >= 4)
        assert trap.sessions == []
        assert [link.url for link in gateway.fleet.links] == ["ws://127.0.0.1:9/link"]
        assert len(gateway.lines.named("lease.refused")) == 1
        assert trap.url not in str(gateway.lines.all)


@pytest.mark.parametrize("address", ["ftp://h:1", "http://h:1/elsewhere", "nothing", "http://"])
async def test_sealed_nonsense_is_refused(server: RedisServer, address: str) -> None:
    """Even a worker of ours may say an address that is none."""
    async with reading(server.url) as gateway, leases_at(server.url) as leases:
        await leases.renew(lease(address))
        await until(lambda: gateway.figure('antiphon_leases_refused_total{reason="malformed"}') >= 1)
        assert gateway.fleet.links == []


async def test_values_that_are_too_long_are_refused(server: RedisServer) -> None:
    """By their length alone."""
    async with reading(server.url) as gateway:
        with server.client() as client:
            client.set(lease_key(32 * "a"), (MAX_LEASE_BYTES + 1) * b" ")
            client.sadd(WORKERS_KEY, 32 * "a")
        await until(lambda: gateway.figure('antiphon_leases_refused_total{reason="too_long"}') >= 1)


async def test_stopped_worker_goes_and_comes_back(server: RedisServer) -> None:
    """Neither lease nor link: it leaves the list; when it goes on it is found again by its old lease."""
    one = worker()
    async with reading(server.url) as gateway, leases_at(server.url) as leases:
        async with one.running():
            mine = lease(one.url)
            await leases.renew(mine)
            await until(lambda: len(gateway.up()) == 1)
        await leases.give_up(mine.id)
        await until(lambda: gateway.fleet.links == [])
        async with one.running():
            await leases.renew(mine)
            await until(lambda: len(gateway.up()) == 1)


async def test_what_the_worker_says_on_the_link_decides(server: RedisServer) -> None:
    """Another model sits at the address of a lease: it is not taken for the one that was there."""
    one = worker()
    async with reading(server.url, offers=("scripted", "other")) as gateway, leases_at(server.url) as leases:
        async with one.running():
            await leases.renew(lease(one.url))
            await until(lambda: len(gateway.up("scripted")) == 1)
        one.info = worker_info("other")
        async with one.running():
            await until(lambda: len(gateway.up("other")) == 1)
            assert gateway.up("scripted") == []


async def test_other_models_are_not_linked(server: RedisServer) -> None:
    """A gateway keeps links to workers of its own models only."""
    async with (
        worker("other").running() as foreign,
        worker().running() as own,
        reading(server.url) as gateway,
        leases_at(server.url) as leases,
    ):
        await leases.renew(lease(foreign.url, "other"))
        await leases.renew(lease(own.url))
        await until(lambda: len(gateway.up()) == 1)
        await gateway.reads(3)
        assert foreign.sessions == []


async def test_fifty_leases_are_fifty_links(server: RedisServer) -> None:
    """A read or two for all; then a settled fleet costs Redis one command a read, whatever its size."""
    async with contextlib.AsyncExitStack() as stack:
        real = [await stack.enter_async_context(worker().running()) for _ in range(5)]
        gateway = await stack.enter_async_context(reading(server.url))
        leases = await stack.enter_async_context(leases_at(server.url))
        for one in real:
            await leases.renew(lease(one.url))
        for _ in range(45):
            await leases.renew(lease("http://127.0.0.1:9", "not offered here"))
        await until(lambda: len(gateway.up()) == 5)
        await until(lambda: gateway.figure("antiphon_registry_workers") == 50)
        await gateway.reads(2)
        with server.client() as client:
            client.config_resetstat()
            await gateway.reads(5)
            assert "cmdstat_getrange" not in client.info("commandstats")


async def test_two_gateways_share_nothing_but_redis(server: RedisServer) -> None:
    """Both find both workers; the end of one gateway is nothing to the other."""
    async with worker().running() as one, worker().running() as two, leases_at(server.url) as leases:
        async with reading(server.url) as here:
            async with reading(server.url) as there, beating(leases, one, two):
                await until(lambda: len(here.up()) == len(there.up()) == 2)
            await here.reads(2)
            assert len(here.up()) == 2
        assert len(one.sessions) == 2


async def test_leases_in_a_cluster_are_found() -> None:
    """Sharded by id; the end of all shards takes no worker with it."""
    with redis_cluster() as cluster:
        async with (
            worker().running() as one,
            worker().running() as two,
            reading(cluster.url) as gateway,
            leases_at(cluster.url) as leases,
        ):
            await leases.renew(lease(one.url))
            await leases.renew(lease(two.url))
            await until(lambda: len(gateway.up()) == 2)
            for server in cluster.servers:
                server.kill()
            await gateway.reads(2, "failed")
            assert len(gateway.up()) == 2
