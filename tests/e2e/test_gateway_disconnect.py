"""Clients that leave, stall or run out of time: the worker hears of it, the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from antiphon.core.generation import Generation, StepOutput
from support.gateways import HELLO, Gateway, events_of, gateway, text_of
from support.loopback import LoopbackWorker, Session, saying, silent


async def talking(session: Session, generation: Generation) -> None:
    """Says one letter a step, as many as were asked for."""
    for position in range(generation.sampling.max_tokens):
        await session.send(StepOutput(generation.id, 0, position, [97]))
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def posted(
    running: Gateway, path: str = "/v1/chat/completions", **fields: object
) -> AsyncIterator[asyncio.StreamReader]:
    """A request on a socket of its own, which closes when the block ends."""
    base: dict[str, object] = {"model": "scripted"}
    base |= {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    body = json.dumps(base | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=64 * 2**20)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(path: str, stream: bool) -> None:
    """The generation is aborted though nothing was ever written."""
    worker = LoopbackWorker(silent)
    async with gateway(worker) as running:
        async with posted(running, path, stream=stream):
            generation = await asyncio.wait_for(worker.submits.get(), 10)
        abort = await asyncio.wait_for(worker.aborts.get(), 10)
        assert (abort.generation, abort.choice) == (generation.id, None)
        (line,) = await running.lines.until("request.finished")
        assert (line["status"], line["finish"]) == (499, "aborted")
        worker.script = saying("hello")
        await running.proves_alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_mid_answer(stream: bool) -> None:
    """While tokens flow; the ones on their way are dropped without a trace."""
    worker = LoopbackWorker(talking)
    async with gateway(worker) as running:
        async with posted(running, stream=stream) as reader:
            generation = await asyncio.wait_for(worker.submits.get(), 10)
            if stream:
                await reader.readuntil(b'"content":"a"')
        abort = await asyncio.wait_for(worker.aborts.get(), 10)
        assert abort.generation == generation.id
        (line,) = await running.lines.until("request.finished")
        assert line["finish"] == "aborted"
        assert not running.lines.named("request.fault")
        worker.script = saying("hello")
        await running.proves_alive()


async def test_leaving_several_prompts_at_once() -> None:
    """Each of a request's generations is aborted."""
    worker = LoopbackWorker(silent)
    async with gateway(worker) as running:
        async with posted(running, "/v1/completions", prompt=["a", "b", "c"], n=2):
            ids = {(await asyncio.wait_for(worker.submits.get(), 10)).id for _ in range(3)}
        assert {(await asyncio.wait_for(worker.aborts.get(), 10)).generation for _ in range(3)} == ids


async def test_a_normal_end_aborts_nothing() -> None:
    """No abort follows an answer that ended by itself."""
    worker = LoopbackWorker(saying("hello"))
    async with gateway(worker) as running:
        for stream in (False, True):
            await running.chat(stream=stream)
            await running.complete(stream=stream)
        assert worker.aborts.empty()


async def test_a_slow_reader_holds_up_nobody() -> None:
    """It stops reading; another client's answer is whole, and its own is whole once it reads on."""
    worker = LoopbackWorker(saying("x" * 4000, per_step=100))
    async with gateway(worker) as running:
        async with posted(running, stream=True, logprobs=True, top_logprobs=20) as reader:
            await reader.readuntil(b'"content":"x')
            await running.proves_alive()
            stream = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 20)
        assert stream.count(b'"token":"x","logprob":-0.5,"bytes":[120],"top_logprobs":[{') > 3000


async def test_time_runs_out() -> None:
    """504 where nothing was sent, an error event in a stream that has begun; the worker is told."""
    worker = LoopbackWorker(silent)
    async with gateway(worker, request_timeout_s=0.05) as running:
        for stream in (False, True):
            response = await running.chat(stream=stream)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
            await asyncio.wait_for(worker.aborts.get(), 10)

        async def slow_after_one(session: Session, generation: Generation) -> None:
            await session.send(StepOutput(generation.id, 0, 0, [97]))
            await asyncio.Event().wait()

        worker.script = slow_after_one
        text = (await running.chat(stream=True)).text
        assert text_of(events_of(text)[:-1]) == "a"
        assert events_of(text)[-1]["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in text
        assert 'finish_reason":"' not in text
        worker.script = saying("hello")
        await running.proves_alive()


async def test_half_a_request() -> None:
    """A client that leaves before its body is complete costs nothing."""
    worker = LoopbackWorker(saying("hello"))
    async with gateway(worker) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        (line,) = await running.lines.until("request.finished")
        assert line["error"] == "request_timeout"
        assert await reader.read() == b""
        assert worker.submits.empty()
        await running.proves_alive()
