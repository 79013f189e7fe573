"""What a gateway knows of the blocks in real worker processes: after chats, a kill -9, a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.core.catalogue import ModelEntry
from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks
from support.gateways import Gateway, gateway, gateway_to
from support.loopback import LoopbackWorker, saying
from support.served import state_of_its_own
from support.workerprocess import SECRET, WorkerProcess, worker_processes

CATALOGUE = '[[model]]\nname = "scripted"\nengine = "scripted"\ncontext = 4096\nprefill_token_s = 0.0005\n'
MODEL = ModelEntry(name="scripted", engine="scripted", context=4096)
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


Workers = Callable[..., contextlib.AbstractContextManager[list[WorkerProcess]]]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts workers of the scripted model, one for each tuple of further options."""
    file = tmp_path / "models.toml"
    file.write_text(CATALOGUE)
    usual = ("--catalogue", str(file), "--model", "scripted", "--redis", "none")
    with state_of_its_own() as environ:
        yield lambda *commands: worker_processes(environ, *((*usual, *options) for options in commands))


async def blocks(running: Gateway) -> dict[str, float]:
    """Blocks by worker, as the gateway knows them."""
    text = (await running.client.get("/metrics")).text
    return {
        sample.labels["worker"].removeprefix("ws").removesuffix("/link"): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "antiphon_router_directory_blocks"
        for sample in family.samples
    }


async def until(running: Gateway, *expected: bool) -> dict[str, float]:
    """Wait until so many workers are known, and of each whether it holds blocks; in any order."""
    for _ in range(1500):
        found = await blocks(running)
        if sorted(map(bool, found.values())) == sorted(expected):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not happen; last seen: {found}")


async def until_same(one: Gateway, other: Gateway) -> None:
    """Wait until two gateways know the same: news take a moment."""
    for _ in range(500):
        if await blocks(one) == await blocks(other):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("two gateways know different blocks")


async def chat(running: Gateway, text: str = TEXT) -> str:
    """The route that a chat took."""
    response = await running.chat(messages=[{"role": "user", "content": text}], max_tokens=8)
    assert response.status_code == 200, response.text
    return response.headers["x-antiphon-route"]


async def test_what_a_worker_holds_is_known_and_followed(workers: Workers) -> None:
    """A prompt goes where its blocks are; a gateway that comes later learns them at once."""
    with workers(("--name", "one"), ("--name", "two")) as (one, two):
        async with gateway_to(one.url, two.url, models=(MODEL,), secret=SECRET) as running:
            await until(running, False, False)
            first = await chat(running)
            await until(running, True, False)
            for _ in range(3):
                again = await chat(running)
                assert again.split()[:2] == [first.split()[0], "prefix"]
            async with gateway_to(one.url, two.url, models=(MODEL,), secret=SECRET) as late:
                await until(late, True, False)
                assert "prefix" in await chat(late)
                await until_same(running, late)
            assert max((await until(running, True, False)).values()) >= len(TEXT) // 32


async def test_a_killed_worker_is_forgotten_and_begins_anew(workers: Workers) -> None:
    """kill -9: its entries vanish with its link; started again at its port it begins with nothing."""
    with workers(()) as (first,):
        port = str(first.port)
        async with gateway_to(first.url, models=(MODEL,), secret=SECRET) as running:
            await chat(running)
            await until(running, True)
            first.kill()
            await until(running)
            with workers(("--port", port)) as (second,):
                assert second.url == first.url
                assert await until(running, False) == {second.url.removeprefix("http"): 0.0}
                await chat(running)
                await until(running, True)


async def test_a_gap_in_the_news_is_asked_about_and_healed() -> None:
    """Row 37: the worker is asked once for a snapshot, and believed; a message of another life is not."""
    worker = LoopbackWorker(saying("hi"))
    worker.life = 5
    worker.first_words = [told(1, [1, 2], part=0)]
    async with gateway(worker) as running, asyncio.timeout(20):
        await until(running, True)
        (session,) = worker.sessions
        await session.tell(told(9, [7], life=4))
        await session.tell(told(3, [3]))
        await session.tell(told(4, [4]))
        assert await worker.resyncs.get() is session
        await session.tell(told(4, [1, 2, 3, 4, 5], part=0))
        while set((await blocks(running)).values()) != {5.0}:
            await session.send()
        assert worker.resyncs.empty()
        await running.proves_alive()


def told(number: int, keys: list[int], part: int | None = None, life: int = 5) -> Blocks:
    """A worker says that these are in its engine."""
    joined = b"".join(key.to_bytes(8, "little") for key in keys)
    return Blocks(life, number, [BlockChange(Tier.ENGINE, True, joined)], part, is_last=part is not None)
