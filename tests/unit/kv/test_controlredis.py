"""The client of the control Redis, against real servers that are slow, stopped, killed and choosy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from antiphon.kv import redisurl
from antiphon.kv.controlredis import ControlFault, ControlRedis, Refusal
from antiphon.kv.keys import ACL, Role
from support.dispatchers import until
from support.redisserver import (
    RedisServer,
    make_certificates,
    redis_cluster,
    redis_sentinel,
    redis_server,
)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One server on loopback."""
    with redis_server() as running:
        yield running


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ControlRedis]:
    """A client that is closed after the block."""
    redis = ControlRedis(redisurl.parse(url))
    try:
        yield redis
    finally:
        await redis.close()


async def test_replies_come_in_order_and_refusals_among_them(server: RedisServer) -> None:
    """One command that is refused spoils no other."""
    async with opened(server.url) as redis:
        replies = await redis.run(
            [("SET", "a", b"x"), ("SADD", "a", "m"), ("GETRANGE", "a", 0, 9), ("DEL", "a", "b")]
        )
    assert replies[0]
    assert isinstance(replies[1], Refusal)
    assert "WRONGTYPE" in replies[1].text
    assert replies[2:] == [b"x", 1]


async def test_stopped_server_costs_the_deadline_and_no_more(server: RedisServer) -> None:
    """SIGSTOP: the kernel accepts, nobody answers. Afterwards the same client works."""
    async with opened(server.url) as redis:
        await redis.run([("PING",)])
        server.pause()
        try:
            for _ in range(2):  # on the old connection, and on a new one
                with pytest.raises(ControlFault, match=r"within 0\.1 s"):
                    await redis.run([("SET", "late", "1")], timeout_s=0.1)
        finally:
            server.resume()
        assert await redis.run([("GETRANGE", "else", 0, 9)]) == [b""]  # no late reply is taken for ours


async def test_server_that_comes_back_is_used_again(server: RedisServer) -> None:
    """kill -9: a fault that says so; a new server at its place is found by the next call."""
    async with opened(server.url) as redis:
        await redis.run([("PING",)])
        server.kill()
        for _ in range(2):
            with pytest.raises(ControlFault, match=r"."):
                await redis.run([("PING",)])
        server.start()
        assert len(await redis.run([("PING",)])) == 1


async def test_cancelling_always_cancels(server: RedisServer) -> None:
    """At whatever point it comes, a cancellation ends the call, and the next call gets its own replies."""
    async with opened(server.url) as redis:
        await redis.run([("SET", "a", "x")])
        num_cancelled = 0
        for num_turns in range(30):
            call = asyncio.create_task(redis.run([("GETRANGE", "a", 0, 9), ("PING",)]))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            was_open = not call.done()
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled() == was_open
            num_cancelled += was_open
            assert await redis.run([("GETRANGE", "b", 0, 9)]) == [b""]
        assert num_cancelled > 3


async def test_no_connection_is_left_behind(server: RedisServer) -> None:
    """After faults, cancellations and the end the server has no client but the test's own."""
    async with opened(server.url) as redis:
        for _ in range(5):
            call = asyncio.create_task(redis.run([("PING",)]))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            await redis.run([("PING",)])
    with server.client() as client:
        await until(lambda: len(client.client_list()) == 1)


async def test_login_by_the_advised_acl_may_do_all() -> None:
    """The rights in docs/redis-keys.md are enough, and do not reach other keys."""
    rights = [word for word in ACL[Role.CONTROL].split("(")[0].split() if word[0] in "~+-"]
    user = ("--user", "control", "on", ">right", *rights)
    with redis_server(*user) as server:
        url = server.url.replace("redis://", "redis://control:right@")
        async with opened(url) as redis:
            worker = "antiphon:control:worker:" + 32 * "0"
            replies = await redis.run(
                [
                    ("SET", worker, "x", "PX", 1000),
                    ("GETRANGE", worker, 0, 9),
                    ("PTTL", worker),
                    ("DEL", worker),
                    ("SADD", "antiphon:control:workers", "m"),
                    ("PEXPIRE", "antiphon:control:workers", 1000),
                    ("SRANDMEMBER", "antiphon:control:workers", 9),
                    ("SREM", "antiphon:control:workers", "m"),
                    ("GETRANGE", "antiphon:kv:x", 0, 9),
                ]
            )
        assert [isinstance(reply, Refusal) for reply in replies] == 8 * [False] + [True]
        async with opened(server.url.replace("redis://", "redis://control:wrong@")) as redis:
            with pytest.raises(ControlFault, match=r"WRONGPASS|password"):
                await redis.run([("PING",)])


async def test_unix_socket_and_database(tmp_path: Path) -> None:
    """As `antiphon serve` starts it; a database number is used."""
    with redis_server(unix=True) as server:
        async with opened(f"{server.url}?db=3") as redis:
            await redis.run([("SET", "here", "1")])
        with server.client() as client:
            assert client.info("keyspace").keys() == {"db3"}


async def test_tls_is_verified(tmp_path: Path) -> None:
    """The server's certificate is checked against the authority in the URL, and without one refused."""
    with redis_server(tls=make_certificates(tmp_path)) as server:
        async with opened(server.url) as redis:
            assert len(await redis.run([("PING",)])) == 1
        async with opened(server.url.partition("?")[0]) as redis:
            with pytest.raises(ControlFault, match=r"(?i)certificate"):
                await redis.run([("PING",)])


async def test_cluster_whose_keys_lie_on_several_shards() -> None:
    """One call reaches all shards; while one is away a call fails or says which commands it refused."""
    keys = [f"antiphon:control:worker:{number}" for number in range(20)]
    with redis_cluster() as cluster:
        async with opened(cluster.url) as redis:
            assert all(await redis.run([("SET", key, key) for key in keys]))
            values = await redis.run([("GETRANGE", key, 0, 99) for key in keys])
            assert values == [key.encode() for key in keys]
            cluster.servers[0].kill()
            try:
                replies = await redis.run([("GETRANGE", key, 0, 99) for key in keys])
            except ControlFault:
                pass
            else:
                assert any(isinstance(reply, Refusal) for reply in replies)


async def test_sentinel_leads_to_the_new_master() -> None:
    """After a failover one call fails, the next ones reach the replica that was promoted."""
    with redis_sentinel() as sentinel:
        async with opened(sentinel.url) as redis:
            await redis.run([("SET", "a", "x")])
            sentinel.fail_over()
            with pytest.raises(ControlFault, match=r"."):
                await redis.run([("PING",)])
            assert await redis.run([("SET", "a", "y")]) == [True]
