"""What is written for each piece: framing, order, and that the fast way writes what the slow way would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.core.errors import EngineFault
from antiphon.core.generation import Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.chat import ChatWriter
from antiphon.gateway.completions import CompletionWriter
from antiphon.gateway.models import ServedModel
from antiphon.gateway.parse import parse_chat, parse_completion
from antiphon.gateway.reply import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    TokenLogprob,
)
from antiphon.gateway.sse import DONE, KEEP_ALIVE, error_event, event, send_events
from antiphon.gateway.text import Piece, TextStream
from antiphon.router.answer import Answer
from support.lines import Lines

MakeAnswer = Callable[..., Answer]
HOSTILE_TEXT = st.text() | st.sampled_from(
    ["\u2028\u2029\x85", '"content":""', '\\"', "\r\n\r\ndata: x", "\0"]
)


def chat_writer(served: ServedModel, answer: Answer, /, **fields: object) -> ChatWriter:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": True} | fields
    request, account = parse_chat(json.dumps(body).encode()), Account("POST", None)
    return ChatWriter(request, TextStream([answer], served, (), account, Lines().logger()), account)


def completion_writer(served: ServedModel, answer: Answer, /, **fields: object) -> CompletionWriter:
    body = {"model": "scripted", "prompt": "x", "stream": True} | fields
    request = parse_completion(json.dumps(body).encode())
    account = Account("POST", None)
    speaker = TextStream([answer], served, (), account, Lines().logger())
    return CompletionWriter(request, speaker, account, ["x"] if request.echo else [])


def parsed(events: bytes) -> list[dict[str, Any]]:
    parts = events.decode("ascii").split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@given(text=HOSTILE_TEXT.filter(bool), name=st.text(min_size=1), usage=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_fast_chat_chunk_is_the_slow_one(
    model: ServedModel, say: MakeAnswer, text: str, name: str, usage: bool
) -> None:
    """Byte for byte what encoding the whole structure gives, whatever the text and the model's name."""
    writer = chat_writer(model, say(""), model=name, stream_options={"include_usage": usage})
    (opening,) = parsed(writer.opening())
    fields: dict[str, Any] = {"usage": None} if usage else {}
    slow = ChatCompletionChunk(
        id=opening["id"],
        created=opening["created"],
        model=name,
        system_fingerprint=opening["system_fingerprint"],
        choices=[ChatChunkChoice(0, ChatDelta(content=text), None, None)],
        **fields,
    )
    assert writer.chunk(Piece(0, text)) == event(slow)


@given(text=HOSTILE_TEXT, name=st.text(min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_fast_completion_chunk_is_the_slow_one(
    model: ServedModel, say: MakeAnswer, text: str, name: str
) -> None:
    """As for chats."""
    writer = completion_writer(model, say(""), model=name)
    (fast,) = parsed(writer.chunk(Piece(0, text)))
    slow = Completion(
        id=fast["id"],
        created=fast["created"],
        model=name,
        system_fingerprint=fast["system_fingerprint"],
        choices=[CompletionChoice(0, text, None, None)],
    )
    assert writer.chunk(Piece(0, text)) == event(slow)


@given(HOSTILE_TEXT)
def test_an_event_is_one_line_of_ascii(text: str) -> None:
    """No client can split it, whatever it takes for a line separator."""
    data = event(ChatDelta(content=text))
    assert data.isascii()
    assert data.decode().splitlines() == [data.decode().removesuffix("\n\n"), ""]
    assert json.loads(data.removeprefix(b"data: "))["content"] == text


def test_roles_come_first_and_once(model: ServedModel, say: MakeAnswer) -> None:
    """In the order of the choices, before any text; text chunks carry no role."""
    writer = chat_writer(model, say("", n=3), n=3)
    opening = parsed(writer.opening())
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1, 2]
    assert all(c["choices"][0]["delta"] == {"role": "assistant", "content": ""} for c in opening)
    (chunk,) = parsed(writer.chunk(Piece(2, "x")))
    assert chunk["choices"] == [
        {"index": 2, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}
    ]


def test_the_end_has_a_chunk_of_its_own(model: ServedModel, say: MakeAnswer) -> None:
    """Text that comes with the end leaves before it."""
    writer = chat_writer(model, say(""))
    writer.opening()
    text, end = parsed(writer.chunk(Piece(0, "x", (), Terminal.LENGTH)))
    assert text["choices"][0]["finish_reason"] is None
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    (end,) = parsed(writer.chunk(Piece(0, "", (), Terminal.STOP)))
    assert end["choices"][0]["finish_reason"] == "stop"


def test_usage_is_last_and_only_where_asked_for(model: ServedModel, say: MakeAnswer) -> None:
    """An own chunk with an empty list of choices; else no such key anywhere."""
    for make in (chat_writer, completion_writer):
        assert make(model, say("")).closing() == b""
        (chunk,) = parsed(make(model, say(""), stream_options={"include_usage": True}).closing())
        assert chunk["choices"] == []
        assert chunk["usage"]["total_tokens"] == 0


def test_all_chunks_agree_on_what_they_belong_to(model: ServedModel, say: MakeAnswer) -> None:
    """Id, time, model and fingerprint are the same from the first to the usage chunk."""
    writer = chat_writer(model, say(""), stream_options={"include_usage": True})
    chunks = parsed(writer.opening() + writer.chunk(Piece(0, "x", (), Terminal.STOP)) + writer.closing())
    heads = {tuple(c[k] for k in ("id", "created", "model", "object", "system_fingerprint")) for c in chunks}
    assert len(heads) == 1
    assert next(iter(heads))[4].startswith("fp_")


def test_the_tier_is_echoed_where_it_was_sent(model: ServedModel, say: MakeAnswer) -> None:
    """What was really used, which is the default one."""
    writer = chat_writer(model, say(""), service_tier="flex")
    assert all(chunk["service_tier"] == "default" for chunk in parsed(writer.opening()))
    assert "service_tier" not in parsed(chat_writer(model, say("")).opening())[0]


def test_scored_chunks_carry_content_even_when_empty(model: ServedModel, say: MakeAnswer) -> None:
    """A chunk with log probabilities never omits its content."""
    writer = chat_writer(model, say(""), logprobs=True)
    writer.opening()
    token = TokenLogprob("h", -0.5, [104], [])
    (chunk,) = parsed(writer.chunk(Piece(0, "", [token])))
    assert chunk["choices"][0]["delta"] == {"content": ""}
    assert chunk["choices"][0]["logprobs"]["content"][0]["token"] == "h"
    assert chunk["choices"][0]["logprobs"]["refusal"] is None


def test_completion_offsets_go_on_through_a_stream(model: ServedModel, say: MakeAnswer) -> None:
    """They count the characters that were written before."""
    writer = completion_writer(model, say(""), logprobs=0)
    chunks = [Piece(0, text, [TokenLogprob(text, -1.0, [ord(text)], [])]) for text in "abc"]
    offsets = [parsed(writer.chunk(c))[0]["choices"][0]["logprobs"]["text_offset"] for c in chunks]
    assert offsets == [[0], [1], [2]]


def test_an_echo_opens_the_stream(model: ServedModel, say: MakeAnswer) -> None:
    """The prompt's text comes as the first chunk of its choice."""
    (chunk,) = parsed(completion_writer(model, say(""), echo=True).opening())
    assert chunk["choices"] == [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]


class Wire:
    """What was sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


async def batches(*items: list[Piece] | Exception) -> AsyncIterator[list[Piece]]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def test_a_stream_from_start_to_end_mark(model: ServedModel, say: MakeAnswer) -> None:
    """One write a batch; the end mark is the last thing said."""
    wire = Wire()
    pieces = batches([Piece(0, "a"), Piece(0, "b")], [Piece(0, "", (), Terminal.STOP)])
    await send_events(pieces, chat_writer(model, say("")), wire.send)
    start, *_ = wire.messages
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert len(wire.bodies) == 3
    assert wire.bodies[-1] == DONE == b"data: [DONE]\n\n"
    assert [c["choices"][0]["delta"].get("content") for c in parsed(wire.bodies[0])] == ["", "a", "b"]
    assert [message.get("more_body") for message in wire.messages[1:]] == [True, True, False]


async def test_silence_begins_the_response_but_says_nothing(model: ServedModel, say: MakeAnswer) -> None:
    """A comment with a single newline: no client takes it for an event. The roles still come first."""
    wire = Wire()
    pieces = batches([], [], [Piece(0, "a")], [], [Piece(0, "", (), Terminal.STOP)])
    await send_events(pieces, chat_writer(model, say("")), wire.send)
    assert wire.bodies[:2] == [KEEP_ALIVE, KEEP_ALIVE] == [b": keep-alive\n"] * 2
    assert parsed(wire.bodies[2])[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert b"\n\n" not in KEEP_ALIVE


async def test_a_failure_before_the_first_piece_sends_nothing(model: ServedModel, say: MakeAnswer) -> None:
    """So it can still be answered with a status of its own."""
    wire = Wire()
    with pytest.raises(EngineFault):
        await send_events(batches(EngineFault("x")), chat_writer(model, say("")), wire.send)
    assert wire.messages == []


def test_an_error_event_has_all_keys_and_no_end_mark() -> None:
    """Clients raise on the `error` key; the end mark would say that all went well."""
    (data,) = parsed(error_event(EngineFault("It failed.")))
    assert data == {
        "error": {"message": "It failed.", "type": "server_error", "param": None, "code": "engine_fault"}
    }
