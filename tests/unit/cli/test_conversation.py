"""A conversation over a real connection."""

from __future__ import annotations

import contextlib
import json

import pytest

from antiphon.cli.conversation import Conversation, Refusal
from antiphon.core.errors import BadRequest
from support.chatserver import ChatServer, says, serving


def _conversation(chat: ChatServer, temperature: float | None = None) -> Conversation:
    conversation = Conversation(chat.url, temperature)
    conversation.choose_model(None)
    return conversation


def test_answer_comes_in_pieces_and_is_remembered() -> None:
    """The pieces are the server's; the next question carries what was said."""
    with serving(ChatServer(chunks=says("Hel", "lo"))) as chat, _conversation(chat) as conversation:
        assert list(conversation.ask("Hi")) == ["Hel", "lo"]
        assert list(conversation.ask("Again")) == ["Hel", "lo"]
        assert chat.requests[1] == {
            "model": "scripted",
            "stream": True,
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Again"},
            ],
        }


def test_system_prompt_and_temperature_are_sent() -> None:
    """What was set goes with every question."""
    with serving(ChatServer(chunks=says("x"))) as chat, _conversation(chat, 0.0) as conversation:
        conversation.system = "Be brief."
        list(conversation.ask("Hi"))
        assert chat.requests[0]["temperature"] == 0.0
        assert chat.requests[0]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]


def test_clear_forgets_the_talk_but_not_the_system_prompt() -> None:
    """After `clear` only the system prompt stands before a question."""
    with serving(ChatServer(chunks=says("x"))) as chat, _conversation(chat) as conversation:
        conversation.system = "S"
        list(conversation.ask("one"))
        conversation.clear()
        list(conversation.ask("two"))
        assert [m["content"] for m in chat.requests[1]["messages"]] == ["S", "two"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_found_however_the_bytes_come(size: int) -> None:
    """Cuts inside events, keep-alive comments, line separators in texts and CRLF change nothing."""
    text = "a\u2028b\x85c é 🎵"
    raw = b": keep-alive\n" + b"".join(says(text, "d")).replace(b"\n\n", b"\r\n\r\n")
    chunks = [raw[i : i + size] for i in range(0, len(raw), size)]
    with serving(ChatServer(chunks=chunks)) as chat, _conversation(chat) as conversation:
        assert list(conversation.ask("Hi")) == [text, "d"]


def test_leaving_early_closes_the_connection_and_keeps_what_was_said() -> None:
    """Whoever stops reading makes the server stop; the piece that was read is part of the talk."""
    chat = ChatServer(chunks=says("Once")[:-1], is_endless=True)
    with serving(chat), _conversation(chat) as conversation:
        with contextlib.closing(conversation.ask("Tell")) as pieces:
            assert next(pieces) == "Once"
        assert chat.client_left.wait(20)
        chat.is_endless, chat.chunks = False, says("more")
        list(conversation.ask("Go on"))
        assert [m["content"] for m in chat.requests[1]["messages"]] == ["Tell", "Once", "Go on"]


@pytest.mark.parametrize(
    ("status", "chunks", "reason"),
    [
        (400, [b'{"error":{"message":"Too long.","type":"x","param":null,"code":null}}'], "Too long."),
        (502, [b"<html>"], "the server answered 502"),
        (500, [b'{"error":"text"}'], "the server answered 500"),
        (200, [*says("x")[:-1], b'data: {"error":{"message":"Lost."}}\n\n'], "Lost."),
        (200, says("x")[:-1], "the answer broke off"),
        (200, [b"data: nonsense\n\n"], "the server sent something that is no answer"),
        (200, [b"data: " + b"x" * (3 << 20)], "the answer broke off"),
    ],
)
def test_refusals_are_said(status: int, chunks: list[bytes], reason: str) -> None:
    """Errors before, inside and instead of a stream become one sentence."""
    with (
        serving(ChatServer(status=status, chunks=chunks)) as chat,
        _conversation(chat) as conversation,
        pytest.raises(Refusal) as refusal,
    ):
        list(conversation.ask("Hi"))
    assert str(refusal.value) == reason


def test_refused_question_leaves_no_trace() -> None:
    """After a refusal the talk goes on as if the question had not been asked."""
    chat = ChatServer(status=400, chunks=[b"{}"])
    with serving(chat), _conversation(chat) as conversation:
        with pytest.raises(Refusal):
            list(conversation.ask("one"))
        chat.status, chat.chunks = 200, says("x")
        list(conversation.ask("two"))
        assert json.dumps(chat.requests[1]["messages"]) == '[{"role": "user", "content": "two"}]'


def test_server_that_dies_in_mid_answer_is_said() -> None:
    """A closed port is a refusal, not a traceback."""
    with serving(ChatServer(chunks=says("x"))) as chat:
        conversation = _conversation(chat)
    with conversation, pytest.raises(Refusal, match="lost"):
        list(conversation.ask("Hi"))


def test_named_model_is_talked_to() -> None:
    """--model wins over the server's first."""
    with serving(ChatServer(chunks=says("x"))) as chat, Conversation(chat.url + "/v1/", None) as conversation:
        conversation.choose_model("other")
        list(conversation.ask("Hi"))
        assert chat.requests[0]["model"] == "other"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (b"<html>", "does not speak"),
        (b'{"data":[]}', "serves no model"),
        (b'{"data":[{}]}', "does not speak"),
    ],
)
def test_servers_that_are_no_chat_servers_are_said(models: bytes, message: str) -> None:
    """Something else at the URL is named as that."""
    with (
        serving(ChatServer(models=models)) as chat,
        Conversation(chat.url, None) as conversation,
        pytest.raises(BadRequest, match=message),
    ):
        conversation.choose_model(None)


def test_nobody_at_the_url_says_how_to_start() -> None:
    """The message tells what to do."""
    with (
        Conversation("http://127.0.0.1:1", None) as conversation,
        pytest.raises(BadRequest, match="antiphon serve"),
    ):
        conversation.choose_model(None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://a b:x"])
def test_url_that_is_none_is_said(url: str) -> None:
    """A wrong --url is a bad argument."""
    with pytest.raises(BadRequest, match="--url"):
        Conversation(url, None)


def test_key_is_sent_with_every_request() -> None:
    """As a bearer; without one there is no such header."""
    with serving(ChatServer(chunks=says("x"))) as chat:
        for key in ("sk-antiphon-x", None, ""):
            with Conversation(chat.url, None, key) as conversation:
                conversation.choose_model(None)
                list(conversation.ask("Hi"))
        assert chat.authorizations == ["Bearer sk-antiphon-x"] * 2 + [None] * 4


def test_missing_key_is_said() -> None:
    """A server that wants a key is no stranger; the line says where the key goes."""
    with (
        serving(ChatServer(models_status=401)) as chat,
        Conversation(chat.url, None) as conversation,
        pytest.raises(BadRequest, match="set ANTIPHON_API_KEY"),
    ):
        conversation.choose_model(None)


@pytest.mark.parametrize("key", ["a b", "a\nb", "clé", "\x1b"])
def test_key_that_cannot_be_sent(key: str) -> None:
    """Refused without being repeated."""
    with pytest.raises(BadRequest, match="the key is none") as caught:
        Conversation("http://127.0.0.1:1", None, key)
    assert key not in caught.value.message
