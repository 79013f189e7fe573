"""Limits over HTTP: two gateways, one database, one control Redis, as SDKs meet them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from antiphon.core.generation import Generation, Terminal
from antiphon.core.grant import Grant, Limits
from antiphon.kv.redisurl import parse
from antiphon.store.database import Database, file_url
from antiphon.store.keys import KeyStore
from support.gateways import HELLO, Gateway, gateway_to
from support.loopback import LoopbackWorker, Script, Session, frames_of, saying
from support.redisserver import RedisServer, redis_server

BODY = {"model": "scripted", "messages": HELLO, "max_tokens": 4}


@pytest.fixture(scope="module")
def control() -> Iterator[RedisServer]:
    """The control Redis of all tests here."""
    with redis_server("--maxmemory-policy", "noeviction") as running:
        yield running


@dataclass
class Pair:
    """Two gateways in front of one worker."""

    gateways: tuple[Gateway, Gateway]
    url: str  # of their database

    async def key(self, **limits: int) -> str:
        """A new key with these limits."""
        database = await Database.open(self.url)
        try:
            _, text = await KeyStore(database).create("acme", "k", Grant(limits=Limits(**limits)))
        finally:
            await database.close()
        return text

    async def post(self, number: int, key: str, **fields: object) -> httpx2.Response:
        """One chat at one of the gateways."""
        headers = {"authorization": f"Bearer {key}"}
        client = self.gateways[number % 2].client
        return await client.post("/v1/chat/completions", json=BODY | fields, headers=headers)


@contextlib.asynccontextmanager
async def pair(
    tmp_path: Path, control: RedisServer, script: Script | None = None, **settings: Any
) -> AsyncIterator[Pair]:
    """Both run until the block ends."""
    worker = LoopbackWorker(script or saying("one two three"))
    url = file_url(tmp_path / "keys.db")
    shared = {"control": parse(control.url), "database": url} | settings
    async with (
        worker.running(),
        gateway_to(worker.url, **shared) as one,
        gateway_to(worker.url, **shared) as other,
    ):
        yield Pair((one, other), url)


async def test_two_gateways_let_the_limit_pass_and_not_one_more(tmp_path: Path, control: RedisServer) -> None:
    """Bug list 23, 27: 200 calls at once, half at each: 30 are answered, 170 are told when to come again."""
    async with pair(tmp_path, control) as both:
        key = await both.key(requests_per_minute=30)
        answers = await asyncio.gather(*(both.post(number, key) for number in range(200)))
        assert Counter(answer.status_code for answer in answers) == {200: 30, 429: 170}
        for refused in (answer for answer in answers if answer.status_code == 429):
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert refused.headers["x-antiphon-dropped-reason"] == "rejected-rate-limit"
            assert 1 <= int(refused.headers["retry-after"]) <= 65
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_are_settled_by_what_streams_and_bodies_used(
    tmp_path: Path, control: RedisServer
) -> None:
    """Bug list 24, 26: streams give back what they did not use, and so do answers nobody waited for."""
    async with pair(tmp_path, control) as both:
        key = await both.key(tokens_per_minute=2000, max_concurrent=2)
        for number in range(6):  # each reserves far more than it uses
            answer = await both.post(number, key, stream=bool(number % 2), max_tokens=200)
            assert answer.status_code == 200
        answer = await both.post(0, key, max_tokens=4)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert answer.headers["x-ratelimit-limit-tokens"] == "2000"
        assert left > 2000 - 7 * 200
        headers = {"authorization": f"Bearer {key}"}
        client = both.gateways[0].client
        body = BODY | {"stream": True, "max_tokens": 200}
        for _ in range(4):  # clients that leave hold no place
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
                assert stream.status_code == 200
                async for _ in stream.aiter_bytes():
                    break
        async with asyncio.timeout(10):
            while (await both.post(1, key)).status_code != 200:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.05)


async def test_a_stream_holds_its_place_until_its_body_ends(tmp_path: Path, control: RedisServer) -> None:
    """Bug list 25: not until its handler or its head is done; and no other gateway has a place meanwhile."""
    goes_on = asyncio.Event()

    async def script(session: Session, generation: Generation) -> None:
        first, *others = frames_of(generation, list(b"one"), 1, Terminal.STOP)
        await session.send(*first)
        await goes_on.wait()
        for frame in others:
            await session.send(*frame)

    async with pair(tmp_path, control, script) as both:
        key = await both.key(max_concurrent=1)
        headers = {"authorization": f"Bearer {key}"}
        client = both.gateways[0].client
        async with client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": True}, headers=headers
        ) as stream:
            pieces = stream.aiter_bytes()
            assert await anext(pieces)
            for number in range(4):
                refused = await both.post(number, key)
                assert refused.status_code == 429
                assert refused.headers["x-antiphon-dropped-reason"] == "rejected-concurrency"
            goes_on.set()
            assert b"[DONE]" in b"".join([piece async for piece in pieces])
        assert (await both.post(0, key)).status_code == 200


async def test_openai_sdk_sees_its_own_error(tmp_path: Path, control: RedisServer) -> None:
    """A used-up budget is a RateLimitError with the code that OpenAI has for it."""
    async with pair(tmp_path, control) as both:
        key = await both.key(tokens_per_day=1)
        url = f"{both.gateways[0].url}/v1"
        async with openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": "x"}]
                )
        assert refused.value.code == "insufficient_quota"
        assert refused.value.type == "insufficient_quota"
        assert refused.value.response.headers["x-antiphon-dropped-reason"] == "rejected-quota"


async def test_sdks_do_not_try_again_where_no_wait_helps(tmp_path: Path, control: RedisServer) -> None:
    """A spent budget is told once; what is busy for seconds may be tried again."""
    async with pair(tmp_path, control) as both:
        spent, busy = await both.key(tokens_per_day=1), await both.key(max_concurrent=1)
        url = f"{both.gateways[0].url}/v1"
        async with openai.AsyncOpenAI(api_key=spent, base_url=url, max_retries=2) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": "x"}]
                )
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert refused.value.response.request.headers["x-stainless-retry-count"] == "0"
        answers = await asyncio.gather(*(both.post(0, busy) for _ in range(20)))
        refusals = [answer for answer in answers if answer.status_code == 429]
        assert refusals
        assert not any("x-should-retry" in answer.headers for answer in refusals)


async def test_other_keys_and_keyless_callers_are_not_counted(tmp_path: Path, control: RedisServer) -> None:
    """One key's limit is nobody else's."""
    async with pair(tmp_path, control) as both:
        spent, other = await both.key(requests_per_minute=1), await both.key(requests_per_minute=5)
        assert [(await both.post(number, spent)).status_code for number in range(2)] == [200, 429]
        assert (await both.post(0, other)).status_code == 200
        assert (await both.gateways[1].client.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_client_tokens_end_with_their_budget(tmp_path: Path, control: RedisServer) -> None:
    """What a browser was given is used up at either gateway; the key it came from is not."""
    async with pair(tmp_path, control) as both:
        key = await both.key(requests_per_minute=100)
        minted = await both.gateways[0].client.post(
            "/v1/client_tokens",
            json={"minutes": 5, "max_tokens": 60},
            headers={"authorization": f"Bearer {key}"},
        )
        token = minted.json()["token"]
        statuses = [(await both.post(number, token)).status_code for number in range(20)]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert (await both.post(0, key)).status_code == 200


async def num_gateways(gateway: Gateway) -> float:
    """How many share the limits, as this one sees it."""
    lines = (await gateway.client.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("antiphon_limits_gateways "))


async def test_a_lost_redis_loses_no_limit(tmp_path: Path) -> None:
    """Killed in mid-use: each gateway goes on with its half."""
    with redis_server("--maxmemory-policy", "noeviction") as control:
        async with pair(tmp_path, control) as both:
            key = await both.key(requests_per_minute=20)
            assert (await both.post(0, key)).status_code == 200
            async with asyncio.timeout(10):
                for gateway in both.gateways:
                    while await num_gateways(gateway) != 2:  # noqa: ASYNC110 - nothing tells of it
                        await asyncio.sleep(0.05)
            control.kill()
            answers = await asyncio.gather(*(both.post(number, key) for number in range(60)))
            assert Counter(answer.status_code for answer in answers)[200] <= 20
            assert Counter(answer.status_code for answer in answers)[200] >= 18
