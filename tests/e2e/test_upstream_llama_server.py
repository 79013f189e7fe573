"""A real llama-server as an upstream, by token ids and by messages, beside a worker of the same model.

Skips where no llama-server was built (`python -m bench peers llama-server`) or the model is not there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.commands import SEPARATE, Shape, llama_server
from bench.errors import BenchFault
from bench.peers import find_llama_server
from bench.servers import running

from antiphon.core.catalogue import ModelEntry, RouteEntry, TargetEntry, UpstreamEntry
from support.gateways import Gateway, events_of, gateway_to, text_of

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Name three colours and three emoji."}]
SHAPE = Shape(num_streams=2, context_tokens=512, threads=2)


@dataclass
class Both:
    """A gateway and the server behind it."""

    gateway: Gateway
    server: str

    async def own_text(self, prompt: str, **wish: object) -> str:
        """What the server itself says to plain text."""
        response = await self.gateway.client.post(f"{self.server}/completion", json={"prompt": prompt} | wish)
        return str(response.json()["content"])


@pytest.fixture
async def both(model_path: Path) -> AsyncIterator[Both]:
    """A gateway with the models `ids` and `chats`, the same server by two ways, and a route over both."""
    try:
        binary = find_llama_server(None)
    except BenchFault:
        pytest.skip("no llama-server here: build it with `python -m bench peers llama-server`")
    async with running(llama_server(binary, model_path, SHAPE, SEPARATE)) as server:
        url = f"{server.url}/v1"
        models = (
            ModelEntry(
                name="ids",
                engine="openai",
                file=str(model_path),
                context=512,
                upstream=UpstreamEntry(url=url, by="llama-server-ids"),
            ),
            ModelEntry(name="chats", engine="openai", upstream=UpstreamEntry(url=url)),
        )
        route = RouteEntry(name="any", targets=(TargetEntry("ids"), TargetEntry("chats")))
        async with gateway_to(models=models, routes=(route,)) as gateway:
            yield Both(gateway, server.url)


async def test_a_real_server_answers_by_ids_and_by_messages(both: Both) -> None:
    """Greedy, the two ways say the same; streams are bodies; scores, stops, limits, n and usage are right."""
    wish = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    ids = (await both.gateway.chat(model="ids", **wish)).json()
    chats = (await both.gateway.chat(model="chats", **wish)).json()
    text = ids["choices"][0]["message"]["content"]
    assert text and text == chats["choices"][0]["message"]["content"]
    assert ids["usage"]["prompt_tokens"] == chats["usage"]["prompt_tokens"]
    assert ids["usage"]["completion_tokens"] == chats["usage"]["completion_tokens"] == 24
    assert ids["choices"][0]["finish_reason"] == chats["choices"][0]["finish_reason"] == "length"

    stream = await both.gateway.chat(model="ids", stream=True, stream_options={"include_usage": True}, **wish)
    events = events_of(stream.text)
    assert text_of(events) == text
    assert events[-1]["usage"]["completion_tokens"] == 24
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    scored = (await both.gateway.chat(model="ids", logprobs=True, top_logprobs=2, **wish)).json()["choices"][
        0
    ]
    entries = scored["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"] or ()).decode(errors="replace") == text
    known = [entry for entry in entries if entry["top_logprobs"]]  # of a torn character only the last token's
    assert 2 * len(known) > len(entries)
    assert all(len(entry["top_logprobs"]) == 2 and -50 < entry["logprob"] <= 0 for entry in known)

    word = text[8:12]
    stopped = (await both.gateway.chat(model="ids", stop=[word], **wish)).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (text[: text.index(word)], "stop")

    two = await both.gateway.chat(model="ids", n=2, seed=5, messages=QUESTION, temperature=1, max_tokens=12)
    first, second = (choice["message"]["content"] for choice in two.json()["choices"])
    assert first != second

    plain = (
        await both.gateway.complete("The capital of France is", model="ids", max_tokens=8, temperature=0)
    ).json()
    assert "Paris" in plain["choices"][0]["text"]
    assert (await both.gateway.chat(model="any", **wish)).json()["choices"][0]["message"]["content"] == text


async def test_text_in_several_tokens_a_character_arrives_whole(both: Both) -> None:
    """Emoji and other scripts: no character is torn, none is lost, stream and body alike."""
    wish = {"temperature": 0, "max_tokens": 24}
    for prompt in ("🎉🎊🥳🎉🎊🥳🎉🎊🥳🎉🎊", "日本語のテキスト。日本語のテキスト。日本語の"):
        body = (await both.gateway.complete(prompt, model="ids", **wish)).json()["choices"][0]["text"]
        stream = await both.gateway.complete(prompt, model="ids", stream=True, **wish)
        parts = [event["choices"][0]["text"] for event in events_of(stream.text)]
        own = await both.own_text(prompt, n_predict=24, temperature=0)
        assert "".join(parts) == body == own.removesuffix("\ufffd")  # a character that the limit tore
        assert any(ord(character) > 0x2000 for character in body)
