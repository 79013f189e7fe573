"""A gateway's limiter over a Redis, and requests that it counts."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest
import structlog

from antiphon.core.clock import VirtualClock, WallClock
from antiphon.core.errors import Busy, StoreUnavailable
from antiphon.core.grant import Grant, Limits, Meter
from antiphon.gateway.account import Account
from antiphon.gateway.callers import Caller
from antiphon.gateway.limiter import Limiter
from antiphon.gateway.schema import ChatRequest
from antiphon.kv.controlredis import ControlRedis
from antiphon.kv.limitcounters import LimitCounters
from antiphon.kv.redisurl import parse
from antiphon.obs.metrics import GatewayMetrics

CHAT = msgspec.json.decode(
    b'{"model":"m","messages":[{"role":"user","content":"hello you"}],"max_tokens":7}', type=ChatRequest
)
ESTIMATE = 10  # 9 bytes of prompt, 7 tokens of answer


@dataclass
class Books:
    """What the database knows of budgets."""

    tokens: int = 0
    is_away: bool = False
    asked: list[str] = field(default_factory=list)

    async def tokens_since(self, key_id: str, since: datetime.datetime) -> int:
        return await self._answer(key_id, since)

    async def tokens_of_client_token(self, token_id: str, since: datetime.datetime) -> int:
        return await self._answer(token_id, since)

    async def _answer(self, meter_id: str, since: datetime.datetime) -> int:
        await asyncio.sleep(0)  # others go on meanwhile
        assert since.tzinfo is not None
        self.asked.append(meter_id)
        if self.is_away:
            raise StoreUnavailable("away", detail="away")
        return self.tokens


@dataclass
class One:
    """One gateway's limiter."""

    limiter: Limiter
    metrics: GatewayMetrics
    books: Books

    async def ask(self, key: str = "key_1", token: Meter | None = None, **limits: int) -> Account:
        """A request that passes, its account still open. Raises Busy."""
        account = account_of(key, token, **limits)
        try:
            await self.limiter.reserve(CHAT, account)
        except BaseException:
            self.close(account)
            raise
        return account

    async def passes(self, key: str = "key_1", **limits: int) -> bool:
        """Whether a request that uses just what it was expected to passes, and ends."""
        try:
            self.close(await self.ask(key, None, **limits), ESTIMATE)
        except Busy:
            return False
        return True

    def close(self, account: Account, num_tokens: int = 0, status: int = 200) -> None:
        """The request ends, having used so much."""
        account.num_answer_tokens = num_tokens
        account.status = status
        account.close(structlog.get_logger(), self.metrics)


def account_of(key: str, token: Meter | None = None, **limits: int) -> Account:
    """The account of a request with this key."""
    account = Account("POST", None)
    account.caller = Caller("tenant_1", "acme", key, Grant(limits=Limits(**limits)), token)
    return account


@contextlib.asynccontextmanager
async def limiter_at(
    url: str | None, books: Books | None = None, clock: VirtualClock | None = None
) -> AsyncIterator[One]:
    """A limiter that runs until the block ends."""
    metrics, books = GatewayMetrics(), books or Books()
    redis = None if url is None else ControlRedis(parse(url))
    shared = None if redis is None else LimitCounters(redis, f"gw_{id(metrics):x}")
    limiter = Limiter(shared, books, metrics.limits, clock or WallClock(), structlog.get_logger())
    running = asyncio.create_task(limiter.run())
    try:
        yield One(limiter, metrics, books)
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()


def key_of(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return f"key_{request.node.name}"


def open_at(fields: dict[bytes, bytes]) -> list[bytes]:
    """What each gateway says of its open requests."""
    return [value for name, value in fields.items() if name.startswith(b"c")]
