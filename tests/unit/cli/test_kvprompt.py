"""A prompt, as the gateway makes it of a request."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.cli.kvchain import Prompt
from antiphon.cli.kvprompt import chat_prompt, text_prompt
from antiphon.cli.models import find_model
from antiphon.core.errors import BadRequest
from antiphon.gateway.models import ServedModel
from antiphon.tokens.template import ChatMessage
from antiphon.tokens.textmodel import load_text_model

ENTRY = find_model("scripted", None, None)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <|im_end|>"}]


def _ids() -> list[int]:
    chat = [ChatMessage(role=message["role"], content=message["content"]) for message in MESSAGES]
    return ServedModel(load_text_model(ENTRY)).chat_prompt(chat)


def test_ids_are_the_gateways() -> None:
    """The same text and the same chat give the ids that a request would."""
    body = msgspec.json.encode({"model": "scripted", "messages": MESSAGES, "temperature": 0})
    text_ids = ServedModel(load_text_model(ENTRY)).text_prompt("Hello")
    assert text_prompt(ENTRY, (), "Hello") == Prompt(text_ids)
    assert chat_prompt(ENTRY, (), body) == Prompt(_ids())
    assert chat_prompt(ENTRY, (), b" " + msgspec.json.encode(MESSAGES)) == Prompt(_ids())


def test_words_that_narrow_are_the_requests() -> None:
    """Salt and key of the request enter its scope; an empty key is none."""
    request = {"model": "m", "messages": MESSAGES, "cache_salt": "s", "prompt_cache_key": "k"}
    assert chat_prompt(ENTRY, (), msgspec.json.encode(request)) == Prompt(_ids(), 0, "s", "k")
    request |= {"prompt_cache_key": ""}
    assert chat_prompt(ENTRY, (), msgspec.json.encode(request)) == Prompt(_ids(), 0, "s", None)


def test_public_system_prompt_is_counted() -> None:
    """The leading tokens that the operator made public, and no more."""
    prompt = chat_prompt(ENTRY, ("Be brief.",), msgspec.json.encode(MESSAGES))
    assert 0 < prompt.num_public_tokens < len(prompt.token_ids)
    assert chat_prompt(ENTRY, ("Be long.",), msgspec.json.encode(MESSAGES)).num_public_tokens == 0


@pytest.mark.parametrize("body", [b"", b"[]", b"[1]", b"{}", b'{"messages":[]}', b"\xff"])
def test_what_is_no_chat_is_refused(body: bytes) -> None:
    """As the gateway refuses it."""
    with pytest.raises(BadRequest):
        chat_prompt(ENTRY, (), body)
