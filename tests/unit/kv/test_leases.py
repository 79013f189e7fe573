"""Leases in a real Redis: they end by themselves, and nothing that lies there is read without a bound."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from antiphon.core.lease import LeaseFault, new_worker_id
from antiphon.kv import leases as module
from antiphon.kv.controlredis import ControlFault
from antiphon.kv.keys import WORKERS_KEY, lease_key
from support.dispatchers import until
from support.leasing import lease, leases_at
from support.redisserver import RedisServer, redis_cluster, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One server on loopback."""
    with redis_server("--maxmemory-policy", "noeviction") as running:
        yield running


async def test_lease_is_found_until_it_is_given_up(server: RedisServer) -> None:
    """Renewed it says the newest; given up nothing is left of it."""
    async with leases_at(server.url) as leases:
        mine = lease("http://h:1")
        await leases.renew(mine)
        busy = msgspec.structs.replace(mine, load=msgspec.structs.replace(mine.load, running=3))
        await leases.renew(busy)
        assert await leases.ids() == [mine.id]
        found = (await leases.read([mine.id]))[mine.id]
        assert found is not None
        assert found.lease == busy
        assert 0 <= found.age_s < module.TTL_S
        await leases.give_up(mine.id)
        assert await leases.ids() == []
    with server.client() as client:
        assert client.dbsize() == 0


async def test_lease_that_is_not_renewed_ends_by_redis_own_clock(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's clock is asked but the server's; the id is listed until a reader forgets it."""
    monkeypatch.setattr(module, "TTL_S", 0.05)
    async with leases_at(server.url) as leases:
        mine = lease("http://h:1")
        await leases.renew(mine)
        with server.client() as client:
            assert 0 < client.pttl(lease_key(mine.id)) <= 50
            assert 50_000 < client.pttl(WORKERS_KEY) <= 60_000
            await until(lambda: not client.exists(lease_key(mine.id)))
        assert await leases.read([mine.id]) == {mine.id: None}
        assert await leases.ids() == [mine.id]
        await leases.forget([mine.id])
        assert await leases.ids() == []


async def test_many_leases_are_read_in_bounded_batches(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty workers in batches of seven; where there are more than the bound, so many are seen."""
    monkeypatch.setattr(module, "_BATCH", 7)
    async with leases_at(server.url) as leases:
        all_of_them = [lease(f"http://h:{number + 1}") for number in range(50)]
        for one in all_of_them:
            await leases.renew(one)
        ids = await leases.ids()
        assert sorted(ids) == sorted(one.id for one in all_of_them)
        found = await leases.read(ids)
        assert all(found[one.id] is not None and found[one.id].lease == one for one in all_of_them)
        monkeypatch.setattr(module, "MAX_WORKERS", 10)
        assert len(set(await leases.ids())) == 10


async def test_huge_and_foreign_values_cost_little(server: RedisServer) -> None:
    """A value of 64 MiB is not fetched; another type, noise and a forgery are no leases; a good one is."""
    async with (
        leases_at(server.url) as leases,
        leases_at(server.url, "the secret of somebody else") as forger,
    ):
        good, forged = lease("http://h:1"), lease("http://evil:1")
        await leases.renew(good)
        await forger.renew(forged)
        huge, noise, typed = (new_worker_id() for _ in range(3))
        with server.client() as client:
            client.set(lease_key(huge), 64 * 2**20 * b"x")
            client.set(lease_key(noise), os.urandom(100))
            client.hset(lease_key(typed), "a", "b")
            before = client.info("stats")["total_net_output_bytes"]
            found = await leases.read([good.id, forged.id, huge, noise, typed])
            assert client.info("stats")["total_net_output_bytes"] - before < 32 * 1024
    assert typed not in found  # cannot be asked about: unknown, not gone
    assert {worker_id: value.lease for worker_id, value in found.items() if value is not None} == {
        good.id: good,
        forged.id: LeaseFault.FORGED,
        huge: LeaseFault.TOO_LONG,
        noise: LeaseFault.MALFORMED,
    }


async def test_members_that_are_no_ids_are_passed_over(server: RedisServer) -> None:
    """No text from outside becomes part of a key."""
    async with leases_at(server.url) as leases:
        good = lease("http://h:1")
        await leases.renew(good)
        with server.client() as client:
            client.sadd(WORKERS_KEY, "", "../etc", b"\xff\xfe", "*", good.id.upper(), 1000 * "a")
        assert await leases.ids() == [good.id]


async def test_what_redis_refuses_is_a_fault(server: RedisServer) -> None:
    """A set that is none, a server that is full: said as faults, not taken for an empty fleet."""
    async with leases_at(server.url) as leases:
        with server.client() as client:
            client.set(WORKERS_KEY, "a string")
            with pytest.raises(ControlFault, match="WRONGTYPE"):
                await leases.ids()
            client.delete(WORKERS_KEY)
            client.config_set("maxmemory", "1")
            with pytest.raises(ControlFault, match="maxmemory"):
                await leases.renew(lease("http://h:1"))


async def test_leases_in_a_cluster() -> None:
    """Each lies on the shard of its key; all are read, given up and forgotten by the same calls."""
    with redis_cluster() as cluster:
        async with leases_at(cluster.url) as leases:
            some = [lease(f"http://h:{number + 1}") for number in range(12)]
            for one in some:
                await leases.renew(one)
            held = []
            for server in cluster.servers:
                with server.client() as client:
                    held.append(len(client.keys("antiphon:control:worker:*")))
            assert sum(held) == 12
            assert max(held) < 12
            found = await leases.read(await leases.ids())
            assert sorted(found) == sorted(one.id for one in some)
            assert None not in found.values()
            await leases.give_up(some[0].id)
            await leases.forget([one.id for one in some[1:]])
            assert await leases.ids() == []
