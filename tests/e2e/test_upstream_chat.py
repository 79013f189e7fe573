"""A gateway in front of another server, by messages: our wire whatever theirs is, over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from support.gateways import Gateway, events_of, gateway_to, text_of
from support.upstreams import KEY, KEY_ENV, UpstreamServer, says


@contextlib.asynccontextmanager
async def in_front_of(server: UpstreamServer, **fields: Any) -> AsyncIterator[Gateway]:
    """A gateway without workers whose model `far` is this server."""
    async with (
        server.running(),
        gateway_to(models=(server.entry(**fields),), upstream_keys={KEY_ENV: KEY}) as running,
    ):
        yield running


async def test_a_stream_and_a_body_hold_the_upstreams_words() -> None:
    """Pieces, finish and the server's own usage, in the form of our own answers."""
    async with in_front_of(UpstreamServer(says("hé", "llo 🎉"))) as running:
        stream = await running.chat(model="far", stream=True, stream_options={"include_usage": True})
        body = (await running.chat(model="far")).json()
    events = events_of(stream.text)
    assert text_of(events) == body["choices"][0]["message"]["content"] == "héllo 🎉"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]].count("stop") == 1
    assert events[-1]["choices"] == [] and events[-1]["usage"] == body["usage"]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert {event["model"] for event in events} == {body["model"]} == {"far"}
    assert stream.headers["x-antiphon-model"] == "far"
    assert stream.text.endswith("data: [DONE]\n\n")
