"""A gateway in front of another server, by messages: our wire whatever theirs is, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest
from openai import AsyncOpenAI

from support.gateways import HELLO, events_of, gateway, gateway_to, text_of
from support.loopback import LoopbackWorker, saying
from support.upstreams import DONE, KEY, Reply, UpstreamServer, data, delta, fails, in_front_of, says, usage


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


async def test_what_is_sent_is_ours() -> None:
    """One Authorization, the upstream's; none of the client's headers; only fields that we know."""
    server = UpstreamServer()
    body = {
        "model": "far",
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, *HELLO],
        "temperature": 0.5,
        "stop": ["END", ""],
        "logit_bias": {"5": 1},
        "top_k": 3,
        "unheard_of": 1,
        "service_tier": "flex",
    }
    async with in_front_of(server) as running:
        headers = {"authorization": "Bearer sk-client", "x-secret": "s", "openai-organization": "o"}
        response = await running.client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.values("authorization") == [f"Bearer {KEY}"]
    assert {"x-secret", "openai-organization", "cookie"} & {name for name, _ in asked.headers} == set()
    assert re.fullmatch("[0-9a-f]{64}", asked.body.pop("cache_salt"))
    assert asked.body == {
        "model": "far-model",
        "messages": [{"role": "system", "content": "be brief"}, *HELLO],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "stop": ["END"],
        "logit_bias": {"5": 1.0},
        "top_k": 3,
    }


async def test_salts_tell_scopes_apart_and_can_be_left_out() -> None:
    """A cache salt of the client's changes ours; where the server takes none, the client's own passes."""
    server = UpstreamServer()
    async with in_front_of(server) as running:
        for salt in (None, "a", "a"):
            await running.chat(model="far", cache_salt=salt)
    first, second, third = (asked.body["cache_salt"] for asked in server.asked)
    assert first != second == third
    plain = UpstreamServer()
    async with in_front_of(plain, salts=False, api_key_env=None) as running:
        await running.chat(model="far")
        await running.chat(model="far", cache_salt="mine")
    assert [asked.body.get("cache_salt") for asked in plain.asked] == [None, "mine"]
    assert plain.asked[0].values("authorization") == []


async def test_choices_and_scores() -> None:
    """n=2 interleaved, roles first; log probabilities as they were sent, made finite."""
    score = {
        "token": "b",
        "logprob": -9999.5,
        "bytes": [98],
        "top_logprobs": [{"token": "b", "logprob": 0.1}],
    }
    reply = Reply(
        [
            delta("b", index=1, logprobs={"content": [score]}),
            delta("a", index=0),
            delta(index=0, finish="length"),
            delta(index=1, finish="stop"),
            usage(),
            DONE,
        ]
    )
    async with in_front_of(UpstreamServer(reply)) as running:
        stream = events_of((await running.chat(model="far", n=2, stream=True, logprobs=True)).text)
        body = (await running.chat(model="far", n=2, logprobs=True, top_logprobs=1)).json()
    assert [event["choices"][0]["index"] for event in stream][:2] == [0, 1]
    assert (text_of(stream, 0), text_of(stream, 1)) == ("a", "b")
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    (entry,) = body["choices"][1]["logprobs"]["content"]
    assert entry == {
        "token": "b",
        "logprob": -9999.0,
        "bytes": [98],
        "top_logprobs": [{"token": "b", "logprob": 0.0, "bytes": None}],
    }


async def test_the_sdk_reads_it() -> None:
    """The openai client, strict, streaming with its own state machine."""
    async with (
        in_front_of(UpstreamServer(says("hel", "lo"))) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", _strict_response_validation=True) as client,
    ):
        async with client.chat.completions.stream(model="far", messages=HELLO) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "hello"
        assert [model.id async for model in client.models.list()] == ["far"]
        with pytest.raises(openai.BadRequestError, match="chats only"):
            await client.completions.create(model="far", prompt="hello")


LONG = b"data: " + b"x" * 1_000_000
GOOD_START = [delta("he")]
MALFORMED = {
    "bad JSON": [b"data: {nope\n\n"],
    "not an object": [b"data: [1]\n\n"],
    "wrong types": [data({"choices": [{"index": "0"}]})],
    "invalid UTF-8": [b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'],
    "deep nesting": [b"data: " + b"[" * 100_000 + b"\n\n"],
    "a choice that was not asked for": [delta("x", index=1)],
    "a negative choice": [delta("x", index=-1)],
    "an unknown end": [delta(finish="because")],
    "a tool call": [data({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]})],
    "an endless line": [LONG] * 100,
    "an endless event": [b"data: " + b"x" * 50_000 + b"\n"] * 100,
    "no finish": [DONE],
    "an empty stream": [],
    "comments only": [b": ping\n\n"] * 3,
    "an error object": [data({"error": {"message": "secret words", "code": 500}})],
    "an error line": [b'error: {"message": "secret words", "code": 500}\n\n'],
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_nonsense_is_an_error_event_and_the_upstream_is_closed(kind: str) -> None:
    """In mid-answer: what came is kept, then an error and no end mark. Before a word: a plain 502."""
    server = UpstreamServer(Reply([*GOOD_START, *MALFORMED[kind]]), Reply(MALFORMED[kind]), says("fine"))
    async with in_front_of(server) as running:
        events = events_of((stream := await running.chat(model="far", stream=True)).text)
        assert text_of(events[:-1]) == "he"
        assert events[-1]["error"]["code"] == "upstream_fault"
        assert "[DONE]" not in stream.text and "secret" not in stream.text
        refused = await running.chat(model="far", stream=True)
        assert refused.status_code == 502
        assert refused.json()["error"]["type"] == "server_error"
        assert (await running.chat(model="far")).json()["choices"][0]["message"]["content"] == "fine"
        metrics = (await running.client.get("/metrics")).text
        assert 'antiphon_upstream_requests_total{outcome="fault",upstream="far"} 2.0' in metrics
        assert 'antiphon_upstream_requests_in_flight{upstream="far"} 0.0' in metrics
    assert server.num_open == 0


async def test_a_body_in_place_of_a_stream_is_refused() -> None:
    """Whoever ignores `stream`, or packs it, is not read."""
    for reply in (
        Reply([b'{"choices":[]}'], content_type="application/json"),
        Reply([b"\x1f\x8b"], headers={"content-encoding": "gzip"}),
    ):
        async with in_front_of(UpstreamServer(reply)) as running:
            assert (await running.chat(model="far")).status_code == 502


async def test_a_connection_that_is_cut_is_an_error() -> None:
    """After 2 of 3 pieces: an error event; the log says so."""
    async with in_front_of(UpstreamServer(Reply([delta("a"), delta("b")], is_cut=True))) as running:
        stream = await running.chat(model="far", stream=True)
        assert events_of(stream.text)[-1]["error"]["code"] == "upstream_fault"
        assert "[DONE]" not in stream.text
        assert running.lines.named("upstream.fault")[0]["spoke"] is True


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_bytes_may_be_cut_anywhere(size: int) -> None:
    """CR LF, comments, a mark of byte order, a character in two halves: all legal, all read."""
    whole = b"\xef\xbb\xbf: hi\r\n\r\n" + b"".join(
        part.replace(b"\n", b"\r\n")
        for part in [delta("é🎉"), b": ping\n\n", delta("!"), delta(finish="stop")]
    )
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    async with in_front_of(UpstreamServer(Reply([*parts, usage(), DONE]))) as running:
        body = (await running.chat(model="far")).json()
    assert body["choices"][0]["message"]["content"] == "é🎉!"
    assert body["usage"]["total_tokens"] == 12


async def test_what_follows_the_end_mark_is_not_read() -> None:
    """The answer is whole; the connection that talks on is closed, not used again."""
    chatty = Reply([*says("hello").parts, delta("more"), DONE])
    server = UpstreamServer(chatty, says("again"))
    async with in_front_of(server) as running:
        assert (await running.chat(model="far")).json()["choices"][0]["message"]["content"] == "hello"
        assert (await running.chat(model="far")).json()["choices"][0]["message"]["content"] == "again"
    assert [asked.connection for asked in server.asked] == [1, 2]


async def test_an_answer_without_usage_or_end_mark_is_whole_by_its_finish() -> None:
    """Tokens are estimated then, and the log line says that they are."""
    async with in_front_of(
        UpstreamServer(Reply([delta("hel"), delta("lo"), delta(finish="stop")]))
    ) as running:
        body = (await running.chat(model="far")).json()
        (line,) = await running.lines.until("request.finished")
    assert body["choices"][0]["message"]["content"] == "hello"
    assert body["usage"]["completion_tokens"] == 2 and body["usage"]["prompt_tokens"] > 0
    assert line["usage_estimated"] is True


async def test_usage_may_be_spread_over_events() -> None:
    """Each figure as it was said last."""
    parts = [
        data({"choices": [], "usage": {"prompt_tokens": 9}}),
        delta("x"),
        data({"choices": [], "usage": {"completion_tokens": 4}}),
        delta(finish="stop"),
        DONE,
    ]
    async with in_front_of(UpstreamServer(Reply(parts))) as running:
        used = (await running.chat(model="far")).json()["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (9, 4, 13)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_a_word", [True, False])
async def test_a_client_that_leaves_takes_the_upstream_with_it(stream: bool, after_a_word: bool) -> None:
    """At once, before the first token too, streaming or not; the account says that the client left."""
    start = [delta("he")] if after_a_word else []
    server = UpstreamServer(Reply([*start, asyncio.Event()]))
    async with in_front_of(server) as running:
        body = json.dumps({"model": "far", "messages": HELLO, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        async with asyncio.timeout(10):
            await server.arrived.get()
            if stream and after_a_word:
                await reader.readuntil(b'"he"')
            writer.close()
            await server.left.get()
            (line,) = await running.lines.until("request.finished")
        assert line["status"] == 499
        metrics = (await running.client.get("/metrics")).text
        assert 'antiphon_upstream_requests_total{outcome="aborted",upstream="far"} 1.0' in metrics
        assert 'antiphon_upstream_up{upstream="far"} 1.0' in metrics


async def test_a_slow_client_slows_the_upstream() -> None:
    """What nobody reads is not read ahead without end: the server's writes stand still."""
    server = UpstreamServer(Reply(endless=delta("x" * 10_000)))
    async with in_front_of(server) as running:
        body = json.dumps({"model": "far", "messages": HELLO, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        async with asyncio.timeout(20):
            await reader.readuntil(b"200")
            sent = -1
            while sent != server.num_sent:  # two looks a while apart see the same: it stands still
                sent = server.num_sent
                await asyncio.sleep(0.3)
            assert sent < 64 * 2**20
            writer.transport.abort()
            await server.left.get()


async def test_two_gateways_in_a_row_say_what_one_says() -> None:
    """Client, gateway, gateway, worker: the same events but for the id, the time and the print."""
    async with gateway(LoopbackWorker(saying("hé🎉llo", cached=5))) as near:
        entry = UpstreamServer().entry(url=f"{near.url}/v1", model="scripted", api_key_env=None)
        async with gateway_to(models=(entry,)) as far:
            wish = {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 1}
            direct = events_of((await near.chat(**wish, stream_options={"include_usage": True})).text)
            relayed = await far.chat(model="far", **wish, stream_options={"include_usage": True})
    varying = ("id", "created", "system_fingerprint", "model")
    plain = [
        [{k: v for k, v in e.items() if k not in varying} for e in s]
        for s in (direct, events_of(relayed.text))
    ]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (fails(400, "max_tokens is too large"), 400, "invalid_value"),
        (fails(422, "what?"), 400, "invalid_value"),
        (fails(400, "too long", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (fails(401, "Incorrect API key provided: sk-up*"), 502, "upstream_fault"),
        (fails(403, "key has no access"), 502, "upstream_fault"),
        (fails(404, "no model"), 502, "upstream_fault"),
        (fails(429, "slow down", retry_after=17), 429, "rate_limit_exceeded"),
        (fails(500, "boom"), 502, "upstream_fault"),
        (fails(503, "loading", retry_after=9), 503, "no_replica"),
        (Reply([data({"error": {"message": "full", "code": 429}})]), 429, "rate_limit_exceeded"),
        (Reply([data({"error": {"message": "what?", "code": 400}})]), 400, "invalid_value"),
        (Reply([b'error: {"message": "boom", "code": 503}\n\n']), 503, "no_replica"),
        (Reply([b"<html>"], 502, "text/html"), 502, "upstream_fault"),
        (Reply([], 302, headers={"location": "http://elsewhere/"}), 502, "upstream_fault"),
    ],
)
async def test_its_errors_in_our_envelope(reply: Reply, status: int, code: str) -> None:
    """The client's mistakes in its words; busy with its Retry-After; of keys not a word."""
    async with in_front_of(UpstreamServer(reply)) as running:
        response = await running.chat(model="far", stream=True)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    assert "key" not in error["message"] and "boom" not in error["message"]
    if status == 400:
        assert error["message"] in {"max_tokens is too large", "what?", "too long"}
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if "retry-after" in reply.headers:
        assert response.headers["retry-after"] == reply.headers["retry-after"]


async def test_a_wrong_key_is_told_to_the_operator() -> None:
    """In the log, with the status; the upstream is not put aside for it."""
    async with in_front_of(UpstreamServer(fails(401, code="invalid_api_key"))) as running:
        for _ in range(7):
            assert (await running.chat(model="far")).status_code == 502
        lines = running.lines.named("upstream.failed")
        assert (lines[0]["status"], lines[0]["code"], lines[0]["level"]) == (401, "invalid_api_key", "error")
        assert not running.lines.named("upstream.aside")
