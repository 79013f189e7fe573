"""Workers that die, lie or refuse, and gateways that are stopped: what clients see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Generation, StepOutput, Terminal
from antiphon.gateway.main import run_gateway, serve
from antiphon.router.mover import MAX_VAIN_MOVES
from support.gateways import HELLO, events_of, gateway, settings_in, text_of
from support.lines import Lines
from support.loopback import LoopbackWorker, Script, Session, saying, silent


async def die(session: Session, generation: Generation) -> None:
    """The process is gone."""
    await session.close()


async def fail(session: Session, generation: Generation) -> None:
    """A step fails."""
    await session.send(StepOutput(generation.id, 0, 2, [], Terminal.ERROR, error="CUDA error at 0x7f00"))


async def babble(session: Session, generation: Generation) -> None:
    """Nonsense comes."""
    await session.raw(b"\xc1nonsense")


async def step_outside(session: Session, generation: Generation) -> None:
    """A token comes that does not exist."""
    await session.send(StepOutput(generation.id, 0, 2, [70000]))


FAULTS = [
    (die, 503, "worker_lost"),
    (fail, 500, "engine_fault"),
    (babble, 503, "worker_lost"),
    (step_outside, 500, "engine_fault"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
async def test_a_fault_in_mid_answer(fault: Script, status: int, code: str) -> None:
    """A stream ends in an error event, never in [DONE] or a finish reason; a body is the error itself."""
    goes_wrong = asyncio.Event()

    async def script(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [104, 105]))
        await goes_wrong.wait()
        await fault(session, generation)

    worker = LoopbackWorker(script)
    async with gateway(worker) as running:
        body = {"model": "scripted", "messages": HELLO, "stream": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as response:
            text = ""
            async for part in response.aiter_text():
                text += part
                if '"content":"hi"' in text:
                    goes_wrong.set()
        *chunks, last = events_of(text)
        assert text_of(chunks) == "hi"
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert set(last) == {"error"}
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert last["error"]["code"] == code
        assert "[DONE]" not in text
        assert "0x7f00" not in text
        num_deaths = 1 + MAX_VAIN_MOVES if fault in (die, babble) else 0
        await running.lines.until("link.up", 1 + num_deaths)
        whole = await running.chat()
        assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
        assert "0x7f00" not in whole.text
        await running.lines.until("link.up", 1 + 2 * num_deaths)
        worker.script = saying("hello")
        await running.proves_alive()


async def test_a_fault_of_one_choice_ends_all() -> None:
    """Half an answer is not an answer; the other choice is ended at the worker."""

    async def one_faulty(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [104]), StepOutput(generation.id, 1, 0, [104]))
        await session.send(StepOutput(generation.id, 1, 1, [], Terminal.ERROR))
        await asyncio.Event().wait()

    worker = LoopbackWorker(one_faulty)
    async with gateway(worker) as running:
        assert (await running.chat(n=2)).status_code == 500
        abort = await asyncio.wait_for(worker.aborts.get(), 10)
        assert abort.generation == (await worker.submits.get()).id


async def test_a_worker_lost_before_the_first_token_is_not_noticed() -> None:
    """Another one answers; the stream is whole."""

    async def gone(session: Session, generation: Generation) -> None:
        await session.close()

    first, second = LoopbackWorker(gone), LoopbackWorker(gone)
    async with gateway(first, second) as running:

        async def heal(session: Session, generation: Generation) -> None:
            first.script = second.script = saying("healed")
            await session.close()

        first.script = second.script = heal
        response = await running.chat(stream=True)
        assert response.status_code == 200
        assert text_of(events_of(response.text)) == "healed"
        assert first.submits.qsize() + second.submits.qsize() == 2


async def test_all_workers_lost_before_the_first_token() -> None:
    """A plain refusal, although the client asked for a stream: after two deaths nobody tries a third time."""

    async def dies(session: Session, generation: Generation) -> None:
        worker.life += 1
        await session.close()

    worker = LoopbackWorker(dies)
    async with gateway(worker) as running:
        response = await running.chat(stream=True)
        assert response.status_code == 422
        assert response.json()["error"]["code"] == "request_quarantined"
        await running.lines.until("link.up", 3)
        assert (await running.chat(stream=True)).json()["error"]["code"] == "request_quarantined"
        assert worker.submits.qsize() == 2


async def test_a_workers_refusal_reaches_the_client() -> None:
    """A queue that is full is a 429, not a fault."""

    async def full(session: Session, generation: Generation) -> None:
        error = "rate_limit_exceeded: The worker's queue is full."
        await session.send(StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error=error))

    async with gateway(LoopbackWorker(full)) as running:
        response = await running.chat(stream=True)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert response.json()["error"]["message"] == "The worker's queue is full."


async def test_a_fault_of_ours_says_nothing() -> None:
    """500 in the envelope, the traceback in the log under the request's id, and the gateway lives."""
    async with gateway(LoopbackWorker(saying("hello"))) as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("antiphon.gateway.chat.chat_messages", lambda _: 1 / 0)
            response = await running.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "division" not in response.text
        (line,) = running.lines.named("request.fault")
        assert line["request_id"] == response.headers["x-request-id"]
        await running.proves_alive()


@contextlib.asynccontextmanager
async def stream_through(worker: LoopbackWorker, drain_s: float, folder: Path) -> AsyncIterator[Stopping]:
    """A gateway that has taken a streamed chat and handed it to this worker."""
    lines = Lines()
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with worker.running():
        settings = settings_in(folder, workers=(worker.url,), drain_s=drain_s)
        serving = asyncio.create_task(serve(settings, ready.set_result, lines.logger()))
        await lines.until("link.up")
        reader, writer = await asyncio.open_connection("127.0.0.1", await ready)
        body = b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"stream":true}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        yield Stopping(serving, ready.result(), reader, await worker.submits.get())
        with pytest.raises(asyncio.CancelledError):
            await serving
        writer.close()


@dataclass
class Stopping:
    """A gateway about to be stopped, its port, and what its one client reads."""

    serving: asyncio.Task[None]
    port: int
    reader: asyncio.StreamReader
    generation: Generation


async def test_stopping_lets_answers_finish(tmp_path: Path) -> None:
    """A stream that is under way gets its end; new connections are refused."""
    may_go_on = asyncio.Event()

    async def slow(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [97]))
        await may_go_on.wait()
        await session.send(StepOutput(generation.id, 0, 1, [98], Terminal.STOP))

    async with stream_through(LoopbackWorker(slow), drain_s=20.0, folder=tmp_path) as stopping:
        stopping.serving.cancel()
        with pytest.raises(ConnectionError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", stopping.port)
                writer.close()
                await writer.wait_closed()
        may_go_on.set()
        answer = await asyncio.wait_for(stopping.reader.read(), 20)
        assert b'"content":"b"' in answer
        assert b"data: [DONE]" in answer


async def test_stopping_gives_up_what_does_not_finish(tmp_path: Path) -> None:
    """After the drain the client gets an error, and its generation is aborted."""
    worker = LoopbackWorker(silent)
    async with stream_through(worker, drain_s=0.1, folder=tmp_path) as stopping:
        stopping.serving.cancel()
        answer = await asyncio.wait_for(stopping.reader.read(), 10)
        assert b"503" in answer.split(b"\r\n")[0]
        assert (await asyncio.wait_for(worker.aborts.get(), 10)).generation == stopping.generation.id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_gateway(number: signal.Signals, tmp_path: Path) -> None:
    """`run_gateway` returns, as after any orderly end."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = settings_in(tmp_path, workers=())
    running = asyncio.create_task(run_gateway(settings, ready.set_result, Lines().logger()))
    assert await ready > 0
    os.kill(os.getpid(), number)
    await asyncio.wait_for(running, 10)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
async def test_other_hosts_need_keys_or_somebody_who_checks(host: str, tmp_path: Path) -> None:
    """Without keys nothing but loopback is bound, unless a proxy is said to stand in front."""
    settings = settings_in(tmp_path, workers=(), host=host)
    with pytest.raises(BadRequest, match="behind-proxy"):
        await serve(settings, lambda _: None, Lines().logger())


async def test_behind_a_proxy_any_host_may_be_bound(tmp_path: Path) -> None:
    """Where the operator says so."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = settings_in(tmp_path, workers=(), host="0.0.0.0", behind_proxy=True)
    serving = asyncio.create_task(serve(settings, ready.set_result, Lines().logger()))
    assert await ready > 0
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """The error names it."""
    async with gateway() as running:
        settings = settings_in(tmp_path, workers=(), port=running.port)
        with pytest.raises(OSError, match=f"port {running.port}"):
            await serve(settings, lambda _: None, Lines().logger())


async def test_a_workers_address_that_is_none(tmp_path: Path) -> None:
    """Refused at the start."""
    settings = settings_in(tmp_path, workers=("localhost",))
    with pytest.raises(BadRequest, match="localhost"):
        await serve(settings, lambda _: None, Lines().logger())
