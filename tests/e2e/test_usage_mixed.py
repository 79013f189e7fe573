"""Books that add up: hundreds of requests of all kinds, workers that die, a gateway that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from antiphon.core.generation import Generation, StepOutput, Terminal
from antiphon.gateway.usagewatch import READINGS_STILL, UsageWatch
from antiphon.obs.metrics import GatewayMetrics
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.usage import UsageStore
from support.booked import Booked, booked, chat, rows_in
from support.gateways import events_of, text_of
from support.lines import Lines
from support.loopback import SECRET, LoopbackWorker, Session, frames_of

NUM_REQUESTS = 300
NUM_AT_ONCE = 16


@dataclass
class Told:
    """What one client knows of its request. `num_tokens`: that it got; a byte is a token."""

    status: int
    num_tokens: int
    has_left: bool = False


class Deadly:
    """Workers of one fleet. What a request asks decides its fate: some steps fail, some workers die."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._died: set[int] = set()

    async def script(self, session: Session, generation: Generation) -> None:
        number = number_in(generation)
        length = 300 if is_leaver(number) else self._draws.randint(1, 40)
        said = bytes(97 + n % 26 for n in range(length))
        end = Terminal.ERROR if number % 20 in (6, 7) else Terminal.STOP
        frames = frames_of(generation, said, self._draws.randint(1, 4), end)
        dies_at = (
            self._draws.randrange(len(frames)) if number % 60 == 11 and number not in self._died else None
        )
        for position, frame in enumerate(frames):
            if position == dies_at:
                self._died.add(number)
                await session.close()
                return
            await session.send(*frame)
            await asyncio.sleep(0.001)  # as long as a step


def number_in(generation: Generation) -> int:
    """Which request it is."""
    prompt = bytes(id for id in generation.token_ids[: generation.num_prompt_tokens] if id < 256)
    found = re.search(rb"<(\d+)>", prompt)
    assert found is not None
    return int(found[1])


def is_leaver(number: int) -> bool:
    """Whether its client leaves after the first event."""
    return number % 10 == 4


async def ask(running: Booked, number: int) -> tuple[str, Told]:
    """One request, like no other; its id, and what its client got."""
    length = 5000 if number % 10 == 9 else number % 7
    fields = {"n": 3 if number % 4 == 2 else 1, "max_tokens": 5 if number % 5 == 1 else 1000}
    messages = [{"role": "user", "content": f"<{number}>" + "x" * length}]
    if number % 2:
        response = await running.chat(messages=messages, **fields)
        if response.status_code != 200:
            return response.headers["x-request-id"], Told(response.status_code, 0)
        body = response.json()
        num_tokens = sum(len(choice["message"]["content"]) for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == num_tokens
        return response.headers["x-request-id"], Told(200, num_tokens)
    text = ""
    async with running.stream(messages=messages, **fields) as response:
        async for part in response.aiter_text():
            text += part
            if is_leaver(number):
                break
    request_id = response.headers["x-request-id"]
    if response.status_code != 200:
        return request_id, Told(response.status_code, 0)
    events = [event for event in events_of(text[: text.rfind("\n\n") + 1]) if "error" not in event]
    num_tokens = sum(len(text_of(events, choice)) for choice in range(fields["n"]))
    return request_id, Told(200, num_tokens, has_left=is_leaver(number))


@pytest.mark.parametrize("seed", [1, 2])
async def test_books_equal_what_clients_got(database_url: str, seed: int) -> None:
    """Each request has one row, which has ended; its tokens are those its client got, or a few more where
    that left; sums are sums of those.
    """
    fleet = Deadly(random.Random(seed))
    workers = [LoopbackWorker(fleet.script) for _ in range(4)]
    told: dict[str, Told] = {}
    async with booked(database_url, *workers) as running:
        room = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(number: int) -> None:
            async with room:
                request_id, known = await ask(running, number)
            assert told.setdefault(request_id, known) is known

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_REQUESTS):
                tasks.create_task(one(number))
    rows = {row.id: row for row in await running.rows()}
    assert rows.keys() == told.keys()
    assert len(rows) == NUM_REQUESTS
    for request_id, known in told.items():
        row = rows[request_id]
        assert row.closed_at is not None
        if known.has_left:
            assert row.answer_tokens >= known.num_tokens
        else:
            assert (row.status, row.answer_tokens) == (known.status, known.num_tokens)
        assert row.cost_micros == (row.prompt_tokens + 10 * row.answer_tokens if row.status == 200 else 0)

    assert {"ok", "client_gone", "engine_fault", "context_length_exceeded"} <= {
        row.outcome for row in rows.values()
    }


GATEWAY = (sys.executable, "-m", "antiphon.cli.main", "gateway", "--port", "0", "--model", "scripted")


@contextlib.contextmanager
def gateway_process(
    folder: Path, worker: str, database_url: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway in a process of its own, and its URL."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    process = subprocess.Popen(
        [*GATEWAY, "--worker", worker, "--secret-file", str(secret), "--control-redis", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"XDG_STATE_HOME": str(folder), "ANTIPHON_DATABASE_URL": database_url},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


async def begin(session: Session, generation: Generation) -> None:
    """Says one token and goes on thinking."""
    await session.send(StepOutput(generation.id, 0, 0, [97]))
    await asyncio.Event().wait()


async def test_a_killed_gateway_loses_no_row(tmp_path: Path, database_url: str) -> None:
    """kill -9 in the middle of streams: their rows are there, open, and others end them as lost."""
    database = await Database.open(database_url)
    _, key = await KeyStore(database).create("acme", "k")
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(LoopbackWorker(begin).running())
        start = stack.enter_context
        process, url = await asyncio.to_thread(start, gateway_process(tmp_path, worker.url, database_url))
        client = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=url, trust_env=False, timeout=20)
        )
        headers = {"authorization": f"Bearer {key}"}
        for _ in range(5):
            stream = client.stream("POST", "/v1/chat/completions", json=chat(stream=True), headers=headers)
            assert (await stack.enter_async_context(stream)).status_code == 200
        process.kill()
        process.wait()
        store = UsageStore(database)
        watch = UsageWatch(store, "gw_other", GatewayMetrics().usage, Lines().logger())
        for _ in range(READINGS_STILL - 1):
            await watch.look()
            assert [row.outcome for row in await rows_in(database_url)] == [None] * 5
        await watch.look()
    rows = await rows_in(database_url)
    assert [(row.outcome, row.is_estimated, row.status) for row in rows] == [("lost", True, None)] * 5
    assert all(row.closed_at is not None for row in rows)
    assert (await store.beats()).keys() == {"gw_other"}
    await database.close()
