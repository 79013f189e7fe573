"""A gateway whose models have prices, a key to it, and its books read afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import httpx2
import msgspec

from antiphon.core.price import PriceEntry
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.usagereport import UsageRecord, UsageReport, Wanted
from support.gateways import HELLO, MODEL, Gateway, gateway
from support.loopback import LoopbackWorker

PRICE = PriceEntry(input=Decimal(1), cached_input=Decimal("0.5"), output=Decimal(10), currency="EUR")
PRICED = msgspec.structs.replace(MODEL, price=PRICE)


@dataclass
class Booked:
    """A gateway that keeps books."""

    gateway: Gateway
    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def chat(self, **fields: object) -> httpx2.Response:
        """One chat with the key."""
        return await self.gateway.client.post(
            "/v1/chat/completions", json=chat(**fields), headers=self.headers
        )

    def stream(self, **fields: object) -> contextlib.AbstractAsyncContextManager[httpx2.Response]:
        """The stream of one chat with the key."""
        body = chat(stream=True, **fields)
        return self.gateway.client.stream("POST", "/v1/chat/completions", json=body, headers=self.headers)

    async def rows(self) -> list[UsageRecord]:
        """All there are, oldest first; the last ends are written when the gateway stops."""
        return await rows_in(self.url)


def chat(**fields: object) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": "scripted", "messages": HELLO} | fields


async def rows_in(url: str) -> list[UsageRecord]:
    """Every row of usage in this database, oldest first."""
    database = await Database.open(url)
    try:
        return [row async for page in UsageReport(database).records(Wanted()) for row in page]
    finally:
        await database.close()


@contextlib.asynccontextmanager
async def booked(url: str, *workers: LoopbackWorker, **settings: Any) -> AsyncIterator[Booked]:
    """A gateway to these workers, with its books in this database."""
    database = await Database.open(url)
    _, key = await KeyStore(database).create("acme", "k")
    await database.close()
    settings = {"models": (PRICED,), "database": url} | settings
    async with gateway(*workers, **settings) as running:
        yield Booked(running, url, key)
