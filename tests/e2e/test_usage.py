"""Usage over real sockets and both databases: one row a request, whichever way it ends."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import msgspec
import pytest

from antiphon.core.catalogue import RouteEntry, TargetEntry
from antiphon.core.generation import Generation, StepOutput, Terminal
from antiphon.store.database import file_url
from support.booked import PRICED, booked, chat
from support.loopback import LoopbackWorker, Session, frames_of, saying, silent, worker_info
from support.postgres import PostgresServer

LONG = [{"role": "user", "content": "x" * 5000}]


@pytest.fixture
def url(tmp_path: Any) -> str:
    """A database file."""
    return file_url(tmp_path / "keys.db")


async def begin(session: Session, generation: Generation) -> None:
    """Says one token and goes on thinking."""
    await session.send(StepOutput(generation.id, 0, 0, [97]))
    await asyncio.Event().wait()


async def fail(session: Session, generation: Generation) -> None:
    """The step fails after two tokens."""
    for frame in frames_of(generation, [97, 98], 2, Terminal.ERROR):
        await session.send(*frame)


async def refuse(session: Session, generation: Generation) -> None:
    """Takes nothing."""
    words = "rate_limit_exceeded;1: full"
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error=words))


async def test_an_answer_is_booked_and_charged(database_url: str) -> None:
    """The row says what the client was told, and what it costs: cached tokens at their price."""
    async with booked(database_url, LoopbackWorker(saying("abcd", cached=2))) as running:
        usage = (await running.chat()).json()["usage"]
    (row,) = await running.rows()
    prompt = usage["prompt_tokens"]
    assert usage["completion_tokens"] == 4
    assert (row.outcome, row.status, row.model, row.endpoint) == (
        "ok",
        200,
        "scripted",
        "/v1/chat/completions",
    )
    assert (row.prompt_tokens, row.cached_tokens, row.answer_tokens) == (prompt, 2, 4)
    assert (row.cost_micros, row.currency) == ((prompt - 2) * 1 + 1 + 4 * 10, "EUR")
    assert (row.tenant, row.is_estimated) == ("acme", False)
    assert row.key_id is not None
    assert row.closed_at is not None
    assert row.opened_at <= row.closed_at


async def test_the_row_is_there_before_the_first_byte(database_url: str) -> None:
    """When the client sees the answer's beginning, its row is in the database, open."""
    async with booked(database_url, LoopbackWorker(begin)) as running, running.stream() as response:
        assert response.status_code == 200
        (row,) = await running.rows()
        assert row.closed_at is row.outcome is None
    (row,) = await running.rows()
    assert (row.outcome, row.answer_tokens, row.status) == ("client_gone", 1, 200)


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
    url: str, script: Any, fields: dict[str, Any], outcome: str, stream: bool
) -> None:
    """Well, by a failed step, a refusal, the deadline, a prompt too long: one row, which ends."""
    timeout_s = 0.2 if script is silent else 20.0
    async with booked(url, LoopbackWorker(script), request_timeout_s=timeout_s) as running:
        response = await running.chat(stream=stream, **fields)
    (row,) = await running.rows()
    num_said = 3 * fields.get("n", 1) if "stop" in fields else 2 * fields.get("n", 1)
    assert (row.outcome, row.status) == (outcome, response.status_code)
    assert row.answer_tokens == (num_said if outcome == "ok" else 0)
    assert (row.prompt_tokens > 0) == (row.cost_micros > 0) == (outcome == "ok")


async def test_a_stream_that_breaks_off_costs_what_it_brought(url: str) -> None:
    """The client got two tokens, then an error: it pays for the prompt and two tokens."""
    go_on = asyncio.Event()

    async def break_off(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [97, 98]))
        await go_on.wait()
        last = StepOutput(generation.id, 0, 3, [], Terminal.ERROR)
        await session.send(StepOutput(generation.id, 0, 2, [99]), last)

    async with booked(url, LoopbackWorker(break_off)) as running, running.stream() as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if "ab" in text:
                go_on.set()
    (row,) = await running.rows()
    assert "engine_fault" in text
    assert (row.outcome, row.status, row.answer_tokens) == ("engine_fault", 200, 2)
    assert row.cost_micros == row.prompt_tokens + 2 * 10


async def test_who_leaves_before_the_answer_pays_for_the_prompt(url: str) -> None:
    """It was being computed."""
    worker = LoopbackWorker(silent)
    async with booked(url, worker) as running:
        asking = asyncio.create_task(running.chat())
        await worker.submits.get()
        asking.cancel()
        await worker.aborts.get()
    (row,) = await running.rows()
    assert (row.outcome, row.status, row.answer_tokens) == ("client_gone", None, 0)
    assert row.cost_micros == row.prompt_tokens > 0


async def test_what_the_server_ends_is_booked(url: str) -> None:
    """A gateway that stops ends its answers, and their rows: a stream pays for what it got."""
    worker = LoopbackWorker(begin)
    async with httpx2.AsyncClient(trust_env=False, timeout=20) as client, AsyncExitStack() as streams:
        async with booked(url, worker, drain_s=0.0) as running:
            path = f"{running.gateway.url}/v1/chat/completions"
            body = chat(stream=True)
            streamed = client.stream("POST", path, json=body, headers=running.headers)
            response = await streams.enter_async_context(streamed)
            whole = asyncio.create_task(client.post(path, json=chat(), headers=running.headers))
            for _ in range(2):
                await worker.submits.get()
        assert b"worker_lost" in await response.aread()
        assert (await whole).status_code == 503
    rows = await running.rows()
    assert sorted((row.status, row.answer_tokens) for row in rows) == [(200, 1), (503, 0)]
    assert {row.outcome for row in rows} == {"worker_lost"}


async def test_the_model_that_answered_is_charged(url: str) -> None:
    """Where the first had no room, the row is the second's, at its price; the first's costs nothing."""
    cheap = msgspec.structs.replace(PRICED, name="cheap", price=None, aliases=())
    route = RouteEntry(name="chat", targets=(TargetEntry("scripted"),), fallback=("cheap",))
    workers = LoopbackWorker(refuse), LoopbackWorker(saying("abc"), worker_info("cheap"))
    async with booked(url, *workers, models=(PRICED, cheap), routes=(route,)) as running:
        assert (await running.chat(model="chat")).status_code == 200
    (row,) = await running.rows()
    assert (row.model, row.answer_tokens, row.cost_micros, row.currency) == ("cheap", 3, 0, None)
    assert row.prompt_tokens > 0


async def test_a_new_price_is_for_new_requests(url: str) -> None:
    """What was booked at the old one stays."""
    dearer = msgspec.structs.replace(PRICED.price, output=PRICED.price.output * 2)
    for price in (PRICED.price, dearer):
        models = (msgspec.structs.replace(PRICED, price=price),)
        async with booked(url, LoopbackWorker(saying("ab")), models=models) as running:
            await running.chat()
    first, second = await running.rows()
    assert second.cost_micros - first.cost_micros == 20


async def test_what_is_not_let_in_has_no_row(url: str) -> None:
    """A wrong key, a wrong model, a body that is none: nothing is booked."""
    async with booked(url, LoopbackWorker(saying("ab"))) as running:
        assert (await running.chat(model="nothing")).status_code == 404
        assert (await running.chat(n="two")).status_code == 400
        running.key = "sk-antiphon-wrong"
        assert (await running.chat()).status_code == 401
    assert await running.rows() == []


async def test_a_locked_database(tmp_path: Any) -> None:
    """With a key: 503, and Retry-After; without one on loopback the chat goes on. Both are booked when the
    lock is gone, and keys work again.
    """
    url = file_url(tmp_path / "keys.db")
    async with booked(url, LoopbackWorker(saying("ab"))) as running:
        assert (await running.chat()).status_code == 200
        holder = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        refused = await running.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        again = await running.chat()
        assert again.status_code == 503
        await running.gateway.proves_alive()
        holder.close()
        await running.gateway.lines.until("usage.available")
        assert (await running.chat()).status_code == 200
    rows = await running.rows()
    assert [(row.outcome, row.key_id is None) for row in rows] == [
        ("ok", False),
        ("store_unavailable", False),
        ("ok", True),
        ("ok", False),
    ]
    assert [row.answer_tokens for row in rows][:2] == [2, 0]


async def test_a_database_server_that_dies_and_comes_back(postgres: PostgresServer) -> None:
    """Its death is known after one request with a key; what it had acknowledged is there, and all the rest
    is written when it is back.
    """
    url = postgres.url(postgres.new_database())
    async with booked(url, LoopbackWorker(saying("ab"))) as running:
        assert (await running.chat()).status_code == 200
        postgres.crash()
        try:
            assert [(await running.chat()).status_code for _ in range(3)] == [503] * 3
            await running.gateway.proves_alive()
        finally:
            postgres.start()
        await running.gateway.lines.until("usage.available")
        assert (await running.chat()).status_code == 200
    rows = await running.rows()
    assert [(row.outcome, row.answer_tokens) for row in rows] == [
        ("ok", 2),
        ("store_unavailable", 0),
        ("ok", 2),
        ("ok", 2),
    ]
