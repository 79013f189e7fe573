"""Limits at two gateways over a real Redis: shared exactly, given back on every way out, kept in outages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.errors import Busy, StoreUnavailable
from antiphon.core.grant import Limits, Meter
from antiphon.core.metering import WINDOW_S
from antiphon.gateway.account import Account
from antiphon.gateway.limiter import estimate
from antiphon.gateway.schema import CompletionRequest, GeneratingRequest
from antiphon.kv.keys import limit_key
from support.dispatchers import until
from support.limiting import CHAT, ESTIMATE, Books, One, account_of, key_of, limiter_at, open_at
from support.redisserver import RedisServer, redis_server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One server for all that do not hurt it."""
    with redis_server("--maxmemory-policy", "noeviction") as running:
        yield running


async def test_exactly_the_limit_passes_of_many_at_once_at_two_gateways(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """200 calls at once: 50 pass, whichever; and no one more while the minute lasts."""
    key = key_of(request)
    async with limiter_at(server.url) as one, limiter_at(server.url) as other:
        tries = [
            limiter.passes(key=key, requests_per_minute=50) for limiter in (one, other) for _ in range(100)
        ]
        assert sum(await asyncio.gather(*tries)) == 50
        assert not await one.passes(key=key, requests_per_minute=50)
        assert not await other.passes(key=key, requests_per_minute=50)


async def test_tokens_overrun_by_nothing_when_many_come_at_once(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """What was reserved counts at once: not what a first few turn out to use later."""
    key = key_of(request)
    async with limiter_at(server.url) as one, limiter_at(server.url) as other:

        async def ask(limiter: One) -> Account | None:
            try:
                return await limiter.ask(key=key, tokens_per_minute=95)
            except Busy:
                return None

        accounts = await asyncio.gather(*(ask(limiter) for limiter in (one, other) for _ in range(40)))
        taken = [account for account in accounts if account is not None]
        assert 1 <= len(taken) <= 9  # refused ones count for a moment, which may keep others out
        assert not await one.passes(key=key, tokens_per_minute=5)


async def test_estimates_are_settled_by_what_was_used(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """Streams and all: what was not used is free again, what was used beyond it is counted."""
    key = key_of(request)
    async with limiter_at(server.url) as one, limiter_at(server.url) as other:
        account = await one.ask(key=key, tokens_per_minute=30)
        one.close(account, num_tokens=25)
        await until(lambda: tokens_in(server, key) == 25)
        with pytest.raises(Busy) as refused:
            await other.ask(key=key, tokens_per_minute=30)
        assert "used 25, requested 10" in refused.value.message
        account = await other.ask(key=key, tokens_per_minute=40)
        other.close(account, num_tokens=0)
        await until(lambda: tokens_in(server, key) == 25)


async def test_what_nobody_is_charged_for_counts_for_no_limit(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """A prompt was read, then admission refused its request: the books say nothing, and so do limits."""
    key = key_of(request)
    async with limiter_at(server.url) as one:
        account = await one.ask(key=key, tokens_per_minute=30, tokens_per_day=30)
        account.num_prompt_tokens = 20
        one.close(account, status=429)
        assert await one.passes(key=key, tokens_per_minute=30, tokens_per_day=30)
        await until(lambda: tokens_in(server, key) == ESTIMATE)


def tokens_in(server: RedisServer, key: str) -> int:
    """Tokens of this minute, as Redis has them."""
    with server.client() as client:
        fields = client.hgetall(limit_key(key))
    return sum(int(value) for name, value in fields.items() if name.startswith(b"t"))


async def test_places_are_free_at_once_here_and_in_a_moment_elsewhere(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """A client that asks again when its answer has ended is not refused; streams hold theirs until then."""
    key = key_of(request)
    async with limiter_at(server.url) as one, limiter_at(server.url) as other:
        for _ in range(20):
            account = await one.ask(key=key, max_concurrent=1)
            with pytest.raises(Busy, match="requests at once"):
                await one.ask(key=key, max_concurrent=1)
            one.close(account)
        account = await one.ask(key=key, max_concurrent=1)
        with pytest.raises(Busy, match="requests at once"):
            await other.ask(key=key, max_concurrent=1)
        one.close(account)
        with server.client() as client:
            await until(lambda: all(v.startswith(b"0:") for v in open_at(client.hgetall(limit_key(key)))))
        assert await other.passes(key=key, max_concurrent=1)


async def test_places_of_a_gateway_that_was_killed_end(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """What it said of its open requests is believed for seconds, not for ever."""
    key = key_of(request)
    with server.client() as client:
        seconds, _ = client.time()
        client.hset(limit_key(key), "cgw_dead", f"1:{seconds - 14}")
        async with limiter_at(server.url) as one:
            with pytest.raises(Busy):
                await one.ask(key=key, max_concurrent=1)
            client.hset(limit_key(key), "cgw_dead", f"1:{seconds - 17}")
            assert await one.passes(key=key, max_concurrent=1)


async def test_refused_and_cancelled_requests_are_counted_nowhere(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """Cancelled at any moment: before it is sent, on its way, after."""
    key = key_of(request)
    async with limiter_at(server.url) as one:
        for turns in range(12):
            task = asyncio.create_task(one.ask(key=key, requests_per_minute=5, max_concurrent=100))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                one.close(task.result())
        kept = await one.ask(key=key, tokens_per_day=10**6, max_concurrent=100)
        one.close(kept, ESTIMATE)
        with server.client() as client:

            def settled() -> bool:
                fields = client.hgetall(limit_key(key))
                slots = {name: int(value) for name, value in fields.items() if name[:1] in b"rt"}
                is_free = all(value.startswith(b"0:") for value in open_at(fields))
                return is_free and sum(v for n, v in slots.items() if n[:1] == b"t") == ESTIMATE

            await until(settled)


async def test_budgets_begin_with_what_the_database_knows(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """A Redis that comes back empty forgets no spending; the database is asked once."""
    key = key_of(request)
    books = Books(tokens=85)
    async with limiter_at(server.url, books) as one, limiter_at(server.url, books) as other:
        assert await one.passes(key=key, tokens_per_day=100)
        with pytest.raises(Busy) as refused:
            await other.ask(key=key, tokens_per_day=100)
        assert refused.value.code == "insufficient_quota"
        assert "used 95, requested 10" in refused.value.message
        assert refused.value.retry_after_s is not None
        assert 0 < refused.value.retry_after_s <= 86_400
        assert books.asked == [key]
        with server.client() as client:
            client.delete(limit_key(key))
        books.tokens = 95
        assert not await one.passes(key=key, tokens_per_day=100)
        assert await one.passes(key=key, tokens_per_month=200)


async def test_a_budget_nobody_knows_is_no_free_ride(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """Without the database a key with a budget gets a 503, and nothing of it stays counted."""
    key = key_of(request)
    async with limiter_at(server.url, Books(is_away=True)) as one:
        with pytest.raises(StoreUnavailable):
            await one.ask(key=key, tokens_per_day=100)
        one.books.is_away = False
        assert await one.passes(key=key, tokens_per_day=10)


async def test_a_client_token_counts_for_itself_and_for_its_key(
    server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """Its own budget ends it; its key's limit holds for all its tokens together."""
    key = key_of(request)
    token = Meter(id=f"ct_{key}", limits=Limits(), max_tokens=25, expires_at=2e9)
    async with limiter_at(server.url) as one:
        for _ in range(2):
            one.close(await one.ask(key=key, token=token, requests_per_minute=3), ESTIMATE)
        with pytest.raises(Busy, match="this client token") as refused:
            await one.ask(key=key, token=token, requests_per_minute=3)
        assert refused.value.retry_after_s is None
        assert await one.passes(key=key, requests_per_minute=3), "the refused one gave its key's back"
        assert not await one.passes(key=key, requests_per_minute=3)


async def test_headers_say_what_is_left(server: RedisServer, request: pytest.FixtureRequest) -> None:
    """On answers and on refusals."""
    key = key_of(request)
    async with limiter_at(server.url) as one:
        account = await one.ask(key=key, requests_per_minute=2, tokens_per_minute=100)
        headers = dict(account.headers)
        assert headers[b"x-ratelimit-remaining-requests"] == b"1"
        assert headers[b"x-ratelimit-remaining-tokens"] == b"90"
        one.close(account)
        refused = account_of(key, requests_per_minute=1)
        with pytest.raises(Busy):
            await one.limiter.reserve(CHAT, refused)
        assert dict(refused.headers)[b"x-ratelimit-remaining-requests"] == b"0"


async def test_a_key_without_limits_costs_nothing(server: RedisServer) -> None:
    """No command is sent for it."""
    async with limiter_at(server.url) as one:
        with server.client() as client:
            await until(lambda: client.exists("antiphon:control:gateways"))
            before = client.info("commandstats").get("cmdstat_hincrby", {"calls": 0})["calls"]
            one.close(await one.ask())
            assert client.info("commandstats").get("cmdstat_hincrby", {"calls": 0})["calls"] == before


async def test_without_a_redis_the_whole_limit_is_kept_here() -> None:
    """The laptop's way: windows by the monotonic clock, budgets by the database."""
    clock = VirtualClock(1e6)
    async with limiter_at(None, Books(tokens=50), clock) as one:
        for _ in range(3):
            assert await one.passes(requests_per_minute=3)
        assert not await one.passes(requests_per_minute=3)
        clock.advance(WINDOW_S + 5.0)
        assert await one.passes(requests_per_minute=3)
        assert await one.passes(key="key_2", tokens_per_day=65)
        assert not await one.passes(key="key_2", tokens_per_day=65)


async def test_a_first_burst_overruns_no_budget() -> None:
    """Whoever learns last what was spent does not forget who came meanwhile."""
    async with limiter_at(None, Books(tokens=50)) as one:
        tries = [one.passes(tokens_per_day=80) for _ in range(20)]
        assert sum(await asyncio.gather(*tries)) == 3


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"model":"m","prompt":"12345678","max_tokens":5}', 3 + 5),
        (b'{"model":"m","prompt":["12345678","1234"],"max_tokens":5,"n":2}', 3 + 2 + 10),
        (b'{"model":"m","prompt":[1,2,3],"max_tokens":0}', 3),
        (b'{"model":"m","prompt":[[1,2],[3]],"max_tokens":1000}', 3 + 256),
    ],
)
def test_estimates_of_completions(body: bytes, tokens: int) -> None:
    """Ids are counted, text is measured, answers are what they usually are."""
    request: GeneratingRequest = msgspec.json.decode(body, type=CompletionRequest)
    assert estimate(request, Meter(id="k", limits=Limits()), 256.0) == tokens


def test_an_estimated_answer_alone_refuses_no_prompt_that_fits() -> None:
    """A small limit is for short answers, not for none."""
    chat = msgspec.structs.replace(CHAT, max_tokens=None)
    assert estimate(chat, Meter(id="k", limits=Limits()), 256.0) == 3 + 256
    assert estimate(chat, Meter(id="k", limits=Limits(tokens_per_minute=100)), 256.0) == 100
    assert estimate(chat, Meter(id="k", limits=Limits(tokens_per_minute=2)), 256.0) == 4
