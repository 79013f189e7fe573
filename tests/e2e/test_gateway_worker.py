"""Gateway and real workers together: the engine follows a script, everything else is the product."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.core.catalogue import ModelEntry
from antiphon.router import mover
from antiphon.worker.build import EngineSize
from antiphon.worker.main import WorkerSettings, run_worker
from support.gateways import HELLO, Gateway, events_of, gateway_to, text_of
from support.lines import Lines
from support.loopback import SECRET


@dataclass
class Pair:
    """A gateway and the metrics of its one worker."""

    gateway: Gateway
    worker_url: str

    async def worker_metrics(self) -> dict[str, float]:
        text = (await self.gateway.client.get(f"{self.worker_url}/metrics")).text
        return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}

    async def until_idle(self) -> dict[str, float]:
        """Wait until the worker computes nothing and nothing waits."""
        async with asyncio.timeout(10):
            while True:
                metrics = await self.worker_metrics()
                busy = metrics["antiphon_num_requests_running"] + metrics["antiphon_num_requests_waiting"]
                if not busy:
                    return metrics
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, **entry: object) -> AsyncIterator[Pair]:
    """Both processes' parts in this one, connected over loopback."""
    model = ModelEntry(name="scripted", engine="scripted", **{"context": 2048} | entry)
    settings = WorkerSettings(
        entry=model, secret=SECRET, weights_folder=tmp_path, size=EngineSize(max_sequences=4), drain_s=0.1
    )
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    log = Lines().logger()
    task = asyncio.create_task(run_worker(settings, ready.set_result, lambda text, part: None, log))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        url = f"http://127.0.0.1:{await ready}"
        async with gateway_to(url, models=(model,)) as running:
            yield Pair(running, url)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_answer_from_end_to_end(tmp_path: Path) -> None:
    """The echo of the prompt, streamed and whole; the second time its prefix is cached."""
    async with pair(tmp_path) as made:
        message = [{"role": "user", "content": "The quick brown fox 🦊 jumps over the lazy dog. " * 3}]
        first = (await made.gateway.chat(messages=message)).json()
        text = first["choices"][0]["message"]["content"]
        assert "fox 🦊" in text
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        events = events_of((await made.gateway.chat(messages=message, stream=True)).text)
        assert text_of(events) == text
        again = (await made.gateway.chat(messages=message)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        (line, *_) = made.gateway.lines.named("request.finished")
        assert line["queue_s"] >= 0


async def test_a_seed_gives_the_same_text_beside_others(tmp_path: Path) -> None:
    """Alone, in a batch with other requests, and as one of several choices."""
    async with pair(tmp_path, script="noise") as made:
        fields = {"seed": 7, "max_tokens": 24, "temperature": 1.0, "logprobs": True}
        alone = (await made.gateway.chat(**fields)).json()["choices"]
        busy = await asyncio.gather(
            made.gateway.chat(**fields),
            made.gateway.chat(**fields | {"seed": 8}),
            made.gateway.chat(**fields | {"n": 2}),
        )
        same, other, both = (response.json()["choices"] for response in busy)
        assert same == alone
        assert both[0] == alone[0]
        assert both[1]["message"] != alone[0]["message"]
        assert other != alone


async def test_leaving_frees_the_engine(tmp_path: Path) -> None:
    """Long before the answer would have been complete, its sequence and its blocks are free."""
    async with pair(tmp_path, script="babble", step_s=0.01) as made:
        body = {"model": "scripted", "messages": HELLO, "stream": True, "ignore_eos": True, "n": 2}
        reader, writer = await asyncio.open_connection("127.0.0.1", made.gateway.port)
        data = json.dumps(body).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        await reader.readuntil(b'"content":')
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await made.gateway.lines.until("request.finished")
        metrics = await made.until_idle()
        assert metrics["antiphon_generation_tokens_total"] < 1000
        assert (await made.gateway.chat(max_tokens=3)).status_code == 200


async def test_more_requests_than_the_engine_runs_at_once(tmp_path: Path) -> None:
    """They wait their turn, and each gets its own answer."""
    async with pair(tmp_path) as made:
        texts = [f"message number {number}" for number in range(16)]
        responses = await asyncio.gather(
            *(made.gateway.chat(messages=[{"role": "user", "content": text}]) for text in texts)
        )
        for text, response in zip(texts, responses, strict=True):
            assert text in response.json()["choices"][0]["message"]["content"]
        await made.until_idle()


async def test_a_step_that_fails_costs_its_answers_only(tmp_path: Path) -> None:
    """An error in the envelope or in the stream; the link stays up and blocks are free again."""
    async with pair(tmp_path, script="babble", fault_after=5) as made:
        assert (await made.gateway.chat(max_tokens=3)).status_code == 200
        response = await made.gateway.chat(max_tokens=20, ignore_eos=True, stream=True)
        last = events_of(response.text)[-1] if response.status_code == 200 else response.json()
        assert last["error"]["code"] == "engine_fault"
        response = await made.gateway.chat(max_tokens=20)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_fault")
        await made.until_idle()
        assert len(made.gateway.lines.named("link.up")) == 1


async def test_an_engine_that_dies_is_an_error_and_then_a_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer waits for another worker and ends in an error; the dying one gets no more work.

    Afterwards nobody serves, and the gateway says so and lives.
    """
    monkeypatch.setattr(mover, "PARKED_S", 0.5)
    async with pair(tmp_path, script="babble", die_after=5) as made:
        response = await made.gateway.chat(max_tokens=20, ignore_eos=True)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
        assert len(made.gateway.lines.named("link.up")) == 1
        assert made.gateway.lines.named("answer.moved") == []
        response = await made.gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        assert (await made.gateway.client.get("/health")).status_code == 200


async def test_two_gateways_share_a_worker(tmp_path: Path) -> None:
    """Each gets its own answers; one that stops takes nothing of the other's with it."""
    async with pair(tmp_path, script="babble", step_s=0.005) as made:
        long = asyncio.create_task(made.gateway.chat(max_tokens=60, ignore_eos=True))
        async with gateway_to(made.worker_url) as other:
            assert (await other.chat(max_tokens=3)).json()["usage"]["completion_tokens"] == 3
        assert (await long).json()["usage"]["completion_tokens"] == 60
