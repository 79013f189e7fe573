"""The gate of a real gateway: who waits, who goes first, who is sent away and with which words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx2
import pytest

from antiphon.core.catalogue import ModelEntry, RouteEntry, TargetEntry
from antiphon.core.generation import Generation, Priority, Terminal
from antiphon.gateway import admission
from antiphon.router.admission import LONGEST_WAIT_S, QueueBounds
from antiphon.store.database import Database, file_url
from antiphon.store.keys import KeyStore
from support.gateways import HELLO, Gateway, gateway, gateway_to
from support.loopback import LoopbackWorker, Session, frames_of, worker_info

FIRST = ModelEntry(name="scripted", engine="scripted", context=4096)
SECOND = ModelEntry(name="second", engine="scripted", context=4096)


class Held:
    """A worker that takes two answers at a time, and says nothing until it is told to."""

    def __init__(self, model: str = "scripted") -> None:
        self._tickets = asyncio.Semaphore(0)
        self.started: list[Generation] = []
        self.worker = LoopbackWorker(self._say, worker_info(model, max_sequences=2))

    def let_end(self, count: int = 1) -> None:
        """Let so many answers come to an end."""
        for _ in range(count):
            self._tickets.release()

    async def until_started(self, count: int) -> None:
        """Wait until so many came here."""
        async with asyncio.timeout(10):
            while len(self.started) < count:
                self.started.append(await self.worker.submits.get())

    async def _say(self, session: Session, generation: Generation) -> None:
        await self._tickets.acquire()
        for frame in frames_of(generation, list(b"hi"), 2, Terminal.STOP):
            await session.send(*frame)


def ask(running: Gateway, user: str = "u", **headers: str) -> asyncio.Task[httpx2.Response]:
    """One chat in a task of its own; `headers` without their prefix."""
    named = {f"x-antiphon-{name.rstrip('_')}": value for name, value in headers.items()}
    body = {"model": "scripted", "messages": HELLO, "max_tokens": 8, "user": user}
    return asyncio.create_task(running.client.post("/v1/chat/completions", json=body, headers=named))


async def number(running: Gateway, name: str) -> float:
    """The sum of a metric over its labels."""
    page = (await running.client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith((name + " ", name + "{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(10):
        while not await condition():
            pass  # asking has waited


async def until_waiting(running: Gateway, count: int) -> None:
    """Wait until so many requests stand in the queue."""

    async def is_so() -> bool:
        return await number(running, "antiphon_queue_requests") == count

    await until(is_so)


@contextlib.asynccontextmanager
async def full(
    held: Held, **settings: object
) -> AsyncIterator[tuple[Gateway, list[asyncio.Task[httpx2.Response]]]]:
    """A gateway whose one worker has all it may get; those two requests end with the block."""
    async with gateway(held.worker, **settings) as running:
        first = [ask(running), ask(running)]
        await held.until_started(2)
        yield running, first
        held.let_end(100)
        await asyncio.gather(*first)


async def test_what_finds_no_place_waits_and_starts_when_one_is_free() -> None:
    """The worker gets its third request when the first has ended, and the log knows how long that was."""
    held = Held()
    async with full(held) as (running, first):
        third = ask(running)
        await until_waiting(running, 1)
        assert held.worker.submits.empty()
        held.let_end()
        await held.until_started(3)
        held.let_end(2)
        assert (await third).status_code == 200
        await asyncio.gather(*first)
        assert await number(running, "antiphon_queue_requests") == 0
        lines = await running.lines.until("request.finished", 3)
        waits = [line["waited_s"] for line in lines if "waited_s" in line]
        assert sorted(wait > 0 for wait in waits) == [False, False, True]


async def test_the_urgent_go_first() -> None:
    """A chat that comes behind two batch requests is the next to start; its class reaches the worker."""
    held = Held()
    async with full(held) as (running, _):
        batch = [ask(running, class_="batch"), ask(running, class_="batch")]
        await until_waiting(running, 2)
        chat = ask(running)
        await until_waiting(running, 3)
        held.let_end(100)
        for response in await asyncio.gather(chat, *batch):
            assert response.status_code == 200
        await held.until_started(5)
        assert [g.priority for g in held.started[2:]] == [
            Priority.INTERACTIVE,
            Priority.BATCH,
            Priority.BATCH,
        ]


async def test_a_flood_from_one_tenant_does_not_hold_up_another(tmp_path: Path) -> None:
    """Behind thirty requests of the one, the other's is among the next two to start."""
    url = file_url(tmp_path / "keys.db")
    database = await Database.open(url)
    keys = [(await KeyStore(database).create(tenant, "k"))[1] for tenant in ("heavy", "light")]
    await database.close()
    held = Held()
    async with gateway(held.worker, database=url) as running:

        def chat(key: str, user: str) -> asyncio.Task[httpx2.Response]:
            body = {"model": "scripted", "messages": HELLO, "max_tokens": 8, "prompt_cache_key": user}
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(
                running.client.post("/v1/chat/completions", json=body, headers=headers)
            )

        flood = [chat(keys[0], "heavy") for _ in range(32)]
        await until_waiting(running, 30)
        light = chat(keys[1], "light")
        await until_waiting(running, 31)
        held.let_end(100)
        for response in await asyncio.gather(light, *flood):
            assert response.status_code == 200
        await held.until_started(33)
        assert "light" in [generation.tenant for generation in held.started[2:4]]


async def test_a_client_that_leaves_while_it_waits_starts_nothing() -> None:
    """Its place in the queue is free at once, and the worker never hears of it."""
    held = Held()
    async with full(held) as (running, _):
        leaver = ask(running)
        await until_waiting(running, 1)
        leaver.cancel()
        await until_waiting(running, 0)
        held.let_end(100)
        await running.proves_alive()
        await held.until_started(3)
        assert held.worker.submits.empty()
        assert await number(running, "antiphon_queue_rejections_total") == 1


async def test_a_time_that_runs_out_in_the_queue_is_told_and_nothing_starts() -> None:
    """504 with the reason; the worker never hears of it."""
    held = Held()
    async with full(held) as (running, _):
        response = await ask(running, timeout="0.2")
        assert response.status_code == 504
        assert response.headers["x-antiphon-dropped-reason"] == "rejected-expired"
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert held.worker.submits.empty()
        lines = await running.lines.until("request.finished")
        assert lines[0]["dropped"] == "rejected-expired"
        assert lines[0]["waited_s"] >= 0.19


async def test_who_has_waited_as_long_as_its_class_may_is_sent_away() -> None:
    """429 with a Retry-After, before any byte of a stream."""
    held = Held()
    bounds = QueueBounds(longest_wait_s=LONGEST_WAIT_S | {Priority.INTERACTIVE: 0.1})
    async with full(held, queue=bounds) as (running, _):
        response = await running.chat(stream=True, max_tokens=8)
        assert response.status_code == 429
        assert response.headers["x-antiphon-dropped-reason"] == "rejected-wait-too-long"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["type"] == "rate_limit_error"


async def test_a_full_queue_is_said_at_once() -> None:
    """Nobody waits to be told that there is no room to wait."""
    held = Held()
    async with full(held, queue=QueueBounds(num_requests=1)) as (running, _):
        waiting = ask(running)
        await until_waiting(running, 1)
        response = await ask(running)
        assert response.status_code == 429
        assert response.headers["x-antiphon-dropped-reason"] == "rejected-queue-full"
        held.let_end(100)
        assert (await waiting).status_code == 200


async def test_an_urgent_request_takes_the_place_of_a_batch_one_in_a_full_queue() -> None:
    """Who is displaced is told so, and may come again."""
    held = Held()
    async with full(held, queue=QueueBounds(num_requests=1)) as (running, _):
        batch = ask(running, class_="batch")
        await until_waiting(running, 1)
        chat = ask(running)
        displaced = await batch
        assert displaced.status_code == 429
        assert displaced.headers["x-antiphon-dropped-reason"] == "rejected-displaced"
        held.let_end(100)
        assert (await chat).status_code == 200


async def test_when_the_last_worker_leaves_those_that_wait_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short patience 503, the code of a model that nobody serves."""
    monkeypatch.setattr(admission, "PATIENCE_S", 0.05)
    held = Held()
    async with gateway() as idle:
        assert (await ask(idle)).json()["error"]["code"] == "no_replica"
    async with contextlib.AsyncExitStack() as stack:
        async with held.worker.running():
            running = await stack.enter_async_context(gateway_to(held.worker.url))
            first = [ask(running), ask(running)]
            await held.until_started(2)
            waiting = ask(running)
            await until_waiting(running, 1)
        response = await waiting
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)


async def test_a_worker_that_comes_back_in_time_finds_them_waiting() -> None:
    """Losing the only worker for a moment costs nobody a place in the queue."""
    held = Held()

    async with contextlib.AsyncExitStack() as stack:
        async with held.worker.running():
            running = await stack.enter_async_context(gateway_to(held.worker.url))
            first = [ask(running), ask(running)]
            await held.until_started(2)
            waiting = ask(running)
            await until_waiting(running, 1)
        held.let_end(100)
        async with held.worker.running():
            assert (await waiting).status_code == 200
            for task in first:
                assert (await task).status_code == 200


async def test_a_busy_model_passes_on_to_the_next_without_waiting() -> None:
    """The route's next model answers at once; the last one of a route is waited for."""
    held, other = Held(), Held("second")
    route = RouteEntry(name="both", targets=(TargetEntry(model="scripted"),), fallback=("second",))
    async with gateway(held.worker, other.worker, models=(FIRST, SECOND), routes=(route,)) as running:
        first = [ask(running), ask(running)]
        await held.until_started(2)
        other.let_end()
        response = await running.chat(model="both", max_tokens=8)
        assert response.headers["x-antiphon-model"] == "second"
        assert await number(running, "antiphon_queue_requests") == 0
        later = [asyncio.create_task(running.chat(model="both", max_tokens=8)) for _ in range(3)]
        await other.until_started(3)
        await until_waiting(running, 1)
        other.let_end(3)
        for task in later:
            assert (await task).headers["x-antiphon-model"] == "second"
        held.let_end(2)
        await asyncio.gather(*first)


async def test_the_time_that_is_left_reaches_the_worker() -> None:
    """Less what was waited; never more than the gateway's own."""
    held = Held()
    async with full(held, request_timeout_s=50.0) as (running, _):
        third = ask(running, timeout="20")
        await until_waiting(running, 1)
        held.let_end(100)
        assert (await third).status_code == 200
        await held.until_started(3)
        assert held.started[0].timeout_s is not None
        assert held.started[2].timeout_s is not None
        assert 40 < held.started[0].timeout_s <= 50
        assert 10 < held.started[2].timeout_s < 20


@pytest.mark.parametrize(("name", "value"), [("class", "vip"), ("timeout", "soon")])
async def test_malformed_headers_are_told(name: str, value: str) -> None:
    """400 that names the header; nothing reaches the worker."""
    held = Held()
    async with gateway(held.worker) as running:
        response = await ask(running, **{name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"x-antiphon-{name}"
        assert held.worker.submits.empty()


async def test_the_tier_in_the_answer_is_the_one_it_got() -> None:
    """OpenAI's words for our classes."""
    held = Held()
    held.let_end(2)
    async with gateway(held.worker) as running:
        flex = await running.chat(service_tier="flex", max_tokens=8)
        auto = await running.chat(service_tier="auto", max_tokens=8)
        assert (flex.json()["service_tier"], auto.json()["service_tier"]) == ("flex", "default")
        await held.until_started(2)
        assert [g.priority for g in held.started] == [Priority.BATCH, Priority.INTERACTIVE]


async def test_a_stopping_gateway_lets_nobody_wait_on() -> None:
    """What stands in the queue ends with the drain, as what is being made does."""
    held = Held()
    async with gateway(held.worker) as running:
        tasks = [ask(running) for _ in range(4)]
        await held.until_started(2)
        await until_waiting(running, 2)
    for task in tasks:
        with contextlib.suppress(httpx2.HTTPError):
            assert (await task).status_code in (500, 503)
