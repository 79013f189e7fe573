"""Usage over real sockets: one row a request, whichever way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.core.generation import Generation, StepOutput, Terminal
from antiphon.core.price import PriceEntry
from antiphon.store.database import Database, file_url
from antiphon.store.keys import KeyStore
from support.gateways import HELLO, MODEL, Gateway, gateway
from support.loopback import LoopbackWorker, Session, frames_of, saying, silent

PRICE = PriceEntry(input=Decimal(1), cached_input=Decimal("0.5"), output=Decimal(10), currency="EUR")
PRICED = msgspec.structs.replace(MODEL, price=PRICE)
FIELDS = ("outcome", "status", "model", "prompt_tokens", "cached_tokens", "answer_tokens", "cost_micros")


@dataclass
class Booked:
    """A gateway, its worker, a key, and a look into its database."""

    gateway: Gateway
    worker: LoopbackWorker
    path: Path
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def chat(self, **fields: object) -> Any:
        """One chat with the key."""
        body = {"model": "scripted", "messages": HELLO} | fields
        return await self.gateway.client.post("/v1/chat/completions", json=body, headers=self.headers)

    def rows(self) -> list[dict[str, Any]]:
        """All there are, oldest first; the last ends are written when the gateway stops."""
        with contextlib.closing(sqlite3.connect(self.path)) as raw:
            raw.row_factory = sqlite3.Row
            return [dict(row) for row in raw.execute("SELECT * FROM usage ORDER BY opened_at")]


@contextlib.asynccontextmanager
async def booked(tmp_path: Path, script: Any, **settings: Any) -> AsyncIterator[Booked]:
    """Run all of it."""
    path = tmp_path / "keys.db"
    database = await Database.open(file_url(path))
    _, key = await KeyStore(database).create("acme", "k")
    await database.close()
    worker = LoopbackWorker(script)
    settings = {"models": (PRICED,), "database": file_url(path)} | settings
    async with gateway(worker, **settings) as running:
        yield Booked(running, worker, path, key)


async def test_an_answer_is_booked_and_charged(tmp_path: Path) -> None:
    """The row says what the client was told, and what it costs: cached tokens at their price."""
    async with booked(tmp_path, saying("abcd", cached=2)) as running:
        usage = (await running.chat()).json()["usage"]
    (row,) = running.rows()
    prompt = usage["prompt_tokens"]
    assert usage["completion_tokens"] == 4
    cost = (prompt - 2) * 1 + 2 * 0.5 + 4 * 10
    assert [row[field] for field in FIELDS] == ["ok", 200, "scripted", prompt, 2, 4, cost]
    assert (row["currency"], row["is_estimated"], row["endpoint"]) == ("EUR", 0, "/v1/chat/completions")
    assert row["id"].startswith("req_")
    assert row["key_id"].startswith("key_")
    assert row["tenant_id"].startswith("tenant_")


async def test_the_row_is_there_before_the_first_byte(tmp_path: Path) -> None:
    """When the client sees the answer's beginning, its row is in the database, open."""

    async def half(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [97]))
        await asyncio.Event().wait()

    async with booked(tmp_path, half) as running:
        body = {"model": "scripted", "messages": HELLO, "stream": True}
        send = running.gateway.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=running.headers
        )
        async with send as response:
            assert response.status_code == 200
            (row,) = running.rows()
            assert row["closed_at"] is row["outcome"] is None
    (row,) = running.rows()
    assert (row["outcome"], row["answer_tokens"]) == ("client_gone", 1)


async def fail(session: Session, generation: Generation) -> None:
    """The step fails after two tokens."""
    for frame in frames_of(generation, [97, 98], 2, Terminal.ERROR):
        await session.send(*frame)


async def refuse(session: Session, generation: Generation) -> None:
    """Takes nothing."""
    words = "rate_limit_exceeded;1: full"
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error=words))


LONG = [{"role": "user", "content": "x" * 5000}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "outcome"),
    [
        (saying("ab"), {}, "ok"),
        (saying("ab"), {"n": 3}, "ok"),
        (saying("ab\ncd"), {"stop": "\n"}, "ok"),
        (fail, {}, "engine_fault"),
        (refuse, {}, "rate_limit_exceeded"),
        (silent, {}, "deadline_exceeded"),
        (saying("ab"), {"messages": LONG}, "context_length_exceeded"),
    ],
)
async def test_every_way_out_ends_one_row(
    tmp_path: Path, script: Any, fields: dict[str, Any], outcome: str, stream: bool
) -> None:
    """Well, by a failed step, a refusal, the deadline, a prompt too long: one row, which ends."""
    timeout_s = 0.2 if script is silent else 20.0
    async with booked(tmp_path, script, request_timeout_s=timeout_s) as running:
        response = await running.chat(stream=stream, **fields)
    (row,) = running.rows()
    num_said = 3 * fields.get("n", 1) if "stop" in fields else 2 * fields.get("n", 1)
    assert (row["outcome"], row["status"]) == (outcome, response.status_code)
    assert row["answer_tokens"] == (num_said if outcome == "ok" else 0)
    assert (row["prompt_tokens"] > 0) == (row["cost_micros"] > 0) == (outcome == "ok")


async def test_a_stream_that_breaks_off_costs_what_it_brought(tmp_path: Path) -> None:
    """The client got two tokens, then an error: it pays for the prompt and two tokens."""
    go_on = asyncio.Event()

    async def break_off(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [97, 98]))
        await go_on.wait()
        await session.send(
            StepOutput(generation.id, 0, 2, [99]), StepOutput(generation.id, 0, 3, [], Terminal.ERROR)
        )

    async with booked(tmp_path, break_off) as running:
        body = {"model": "scripted", "messages": HELLO, "stream": True}
        send = running.gateway.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=running.headers
        )
        async with send as response:
            text = ""
            async for part in response.aiter_text():
                text += part
                if "ab" in text:
                    go_on.set()
    (row,) = running.rows()
    assert "engine_fault" in text
    assert (row["outcome"], row["status"], row["answer_tokens"]) == ("engine_fault", 200, 2)
    assert row["cost_micros"] == row["prompt_tokens"] + 2 * 10


async def test_what_is_not_let_in_has_no_row(tmp_path: Path) -> None:
    """A wrong key, a wrong model, a body that is none: nothing is booked."""
    async with booked(tmp_path, saying("ab")) as running:
        assert (await running.chat(model="nothing")).status_code == 404
        assert (await running.chat(n="two")).status_code == 400
        running.key = "sk-antiphon-wrong"
        assert (await running.chat()).status_code == 401
    assert running.rows() == []
