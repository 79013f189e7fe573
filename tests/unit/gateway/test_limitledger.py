"""Limits while Redis is killed, stands still, lies or is a cluster: nobody waits long, all heals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from antiphon.core.errors import Busy
from antiphon.gateway.limitledger import AWAY_S, GREET_S
from antiphon.kv.keys import limit_key
from support.dispatchers import until
from support.limiting import Books, One, key_of, limiter_at
from support.redisserver import RedisServer, redis_cluster, redis_server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One server for all that do not hurt it."""
    with redis_server("--maxmemory-policy", "noeviction") as running:
        yield running


def gateways(one: One) -> float:
    """How many share the limits, as this one sees it."""
    return float(one.metrics.limits.gateways._value.get())


async def test_alone_a_gateway_enforces_its_part_and_joins_again(request: pytest.FixtureRequest) -> None:
    """Redis killed in mid-use: two gateways let half of the limit pass each; both heal by themselves."""
    key = key_of(request)
    with redis_server("--maxmemory-policy", "noeviction") as server:
        async with limiter_at(server.url) as one, limiter_at(server.url) as other:
            await until(lambda: gateways(one) == gateways(other) == 2)
            assert await one.passes(key=key, requests_per_minute=10)
            server.kill()
            for limiter, num_passed in ((one, 4), (other, 5)):  # one of its five came before
                for _ in range(num_passed):
                    assert await limiter.passes(key=key, requests_per_minute=10)
                assert not await limiter.passes(key=key, requests_per_minute=10)
            assert one.metrics.limits.is_alone._value.get() == 1
            server.start()
            await until(lambda: one.metrics.limits.is_alone._value.get() == 0)
            assert await one.passes(key=key, requests_per_minute=10)


async def test_a_redis_that_stands_still_holds_up_few(request: pytest.FixtureRequest) -> None:
    """One call waits for its deadline; while Redis is away none does."""
    key = key_of(request)
    with redis_server("--maxmemory-policy", "noeviction") as server:
        async with limiter_at(server.url) as one:
            assert await one.passes(key=key, requests_per_minute=10**6)
            server.pause()
            assert await one.passes(key=key, requests_per_minute=10**6)
            assert one.limiter._ledger is not None
            assert one.limiter._ledger.is_away
            for _ in range(200):
                assert await one.passes(key=key, requests_per_minute=10**6)
            assert one.metrics.limits.is_alone._value.get() == 1
            server.resume()
            await until(lambda: one.metrics.limits.is_alone._value.get() == 0)


async def test_budgets_know_what_passed_while_redis_stood_still(request: pytest.FixtureRequest) -> None:
    """It comes back with its old counts: the database, which was told meanwhile, corrects them once."""
    key = key_of(request)
    with redis_server("--maxmemory-policy", "noeviction") as server:
        async with limiter_at(server.url, Books(tokens=0)) as one:
            assert await one.passes(key=key, tokens_per_day=100)
            server.pause()
            for _ in range(3):
                assert await one.passes(key=key, tokens_per_day=100)
            one.books.tokens = 40  # all four are in the books
            server.resume()
            await until(lambda: one.metrics.limits.is_alone._value.get() == 0)
            one.books.asked.clear()
            with pytest.raises(Busy, match="used 40, requested 10"):
                await one.ask(key=key, tokens_per_day=45)
            with pytest.raises(Busy, match="used 40, requested 10"):
                await one.ask(key=key, tokens_per_day=45)
            assert one.books.asked == [key]


async def test_counts_of_a_clock_that_jumped_are_no_lasting_harm(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """Slots of a future that Redis' clock took back are ignored, and cleared away."""
    key = key_of(request)
    with server.client() as client:
        seconds, _ = client.time()
        future = (seconds + 3600) // 5
        client.hset(limit_key(key), f"r{future}", 1000)
        async with limiter_at(server.url) as one:
            assert await one.passes(key=key, requests_per_minute=1)
            await until(lambda: not client.hexists(limit_key(key), f"r{future}"))


async def test_what_is_none_of_ours_is_not_believed(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """A key of another type: this gateway goes on alone."""
    key = key_of(request)
    with server.client() as client:
        client.set(limit_key(key), "x")
    async with limiter_at(server.url) as one:
        assert await one.passes(key=key, requests_per_minute=1)
        assert not await one.passes(key=key, requests_per_minute=1)
        assert one.metrics.limits.is_alone._value.get() == 1


async def test_limits_hold_in_a_cluster() -> None:
    """Each key's counts lie on one shard; the clock is asked of any."""
    with redis_cluster() as cluster:
        async with limiter_at(cluster.url) as one, limiter_at(cluster.url) as other:
            for key in ("a", "b", "c", "d"):
                tries = [
                    limiter.passes(key=key, requests_per_minute=5)
                    for limiter in (one, other)
                    for _ in range(5)
                ]
                assert sum(await asyncio.gather(*tries)) == 5
            assert one.metrics.limits.is_alone._value.get() == 0


def test_the_rhythm_fits_what_is_promised() -> None:
    """A gateway says that it lives more often than others give it up; a lost Redis is asked again at once."""
    assert 3 * GREET_S < 10.0
    assert AWAY_S < GREET_S
