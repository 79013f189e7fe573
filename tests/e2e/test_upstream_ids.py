"""An upstream that takes token ids, through a whole gateway with the built-in model's vocabulary."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.catalogue import ModelEntry, UpstreamEntry
from antiphon.tokens.gguf import GgufTokenizer
from support.gateways import Gateway, events_of, gateway_to, text_of
from support.upstreams import DONE, Reply, UpstreamServer, data, fails

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> GgufTokenizer:
    return GgufTokenizer(model_path)


@contextlib.asynccontextmanager
async def in_front_of(server: UpstreamServer, model_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose model `far` is this server, by vLLM's ids."""
    async with server.running():
        upstream = UpstreamEntry(url=server.url, by="vllm-ids")
        entry = ModelEntry(name="far", engine="openai", file=str(model_path), context=256, upstream=upstream)
        async with gateway_to(models=(entry,)) as running:
            yield running


def event(ids: list[int], finish: str | None = None) -> bytes:
    return data({"choices": [{"index": 0, "text": "", "token_ids": ids, "finish_reason": finish}]})


def counted(cached: int) -> bytes:
    details = {"cached_tokens": cached}
    return data({"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": details}})


def says(tokenizer: GgufTokenizer, text: str) -> Reply:
    """This text, an id an event, then the end of turn as vLLM sends it."""
    ids = [event([token_id]) for token_id in tokenizer.encode(text)]
    return Reply([*ids, event([tokenizer.end_ids[0]], "stop"), counted(3), DONE])


async def test_text_is_made_here(model_path: Path, tokenizer: GgufTokenizer) -> None:
    """Prompt ids are the template's; text, stop strings and usage are ours, stream and body alike."""
    text = "Hé 🎉 and more"
    server = UpstreamServer(says(tokenizer, text))
    async with in_front_of(server, model_path) as running:
        body = (await running.chat(model="far")).json()
        stream = await running.chat(model="far", stream=True)
        stopped = (await running.chat(model="far", stop=" and", n=2)).json()
        plain = (await running.complete([1, 2, 3], model="far", echo=True)).json()
    assert body["choices"][0]["message"]["content"] == text_of(events_of(stream.text)) == text
    assert body["usage"]["prompt_tokens"] == len(server.asked[0].body["prompt"])
    assert body["usage"]["completion_tokens"] == len(tokenizer.encode(text))
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert [c["message"]["content"] for c in stopped["choices"]] == ["Hé 🎉"] * 2
    assert [c["finish_reason"] for c in stopped["choices"]] == ["stop"] * 2
    assert plain["choices"][0]["text"].endswith(text)
    assert server.asked[-1].body["prompt"] == [1, 2, 3]
    seeds = [asked.body["seed"] for asked in server.asked[2:4]]
    assert abs(seeds[0] - seeds[1]) == 1


async def test_a_stop_string_ends_the_answer_there(model_path: Path, tokenizer: GgufTokenizer) -> None:
    """The connection closes though the server would go on."""
    ids = [event([token_id]) for token_id in tokenizer.encode("one two three")]
    server = UpstreamServer(Reply([*ids, asyncio.Event()]))
    async with in_front_of(server, model_path) as running, asyncio.timeout(10):
        body = (await running.chat(model="far", stop=" two")).json()
        assert body["choices"][0]["message"]["content"] == "one"
        await server.left.get()


async def test_too_long_a_prompt_is_refused_here(model_path: Path) -> None:
    """Before anything is sent, with the words that clients look for."""
    server = UpstreamServer()
    async with in_front_of(server, model_path) as running:
        response = await running.complete(list(range(300)), model="far")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not server.asked


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (fails(429, retry_after=17), 429, "rate_limit_exceeded"),
        (fails(503, retry_after=17), 503, "no_replica"),
        (fails(400, "a secret of the user"), 400, "invalid_value"),
        (fails(401), 502, "upstream_fault"),
        (Reply([event([10**9]), DONE]), 500, "engine_fault"),
        (Reply([event([2**40]), DONE]), 502, "upstream_fault"),
        (Reply([event([-1]), DONE]), 502, "upstream_fault"),
        (Reply([event([7] * 9), DONE]), 502, "upstream_fault"),
        (Reply([data({"choices": [{"text": "x"}]}), DONE]), 502, "upstream_fault"),
        (Reply([event([7])], is_cut=True), 502, "upstream_fault"),
        (Reply([DONE]), 502, "upstream_fault"),
    ],
)
async def test_its_errors_are_ours(model_path: Path, reply: Reply, status: int, code: str) -> None:
    """As by messages: waits pass through, too many tokens are a fault, none of its words is logged."""
    async with in_front_of(UpstreamServer(reply), model_path) as running:
        response = await running.chat(model="far", max_tokens=8)
        lines: list[dict[str, Any]] = running.lines.all
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if "retry-after" in reply.headers:
        assert response.headers["retry-after"] == "17"
    assert "secret" not in str(lines)
