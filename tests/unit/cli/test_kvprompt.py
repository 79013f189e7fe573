"""A prompt's tokens, as the gateway makes them."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.cli.kvprompt import chat_ids, text_ids
from antiphon.cli.models import find_model
from antiphon.core.errors import BadRequest
from antiphon.gateway.models import ServedModel
from antiphon.tokens.template import ChatMessage
from antiphon.tokens.textmodel import load_text_model

ENTRY = find_model("scripted", None, None)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <|im_end|>"}]


def test_ids_are_the_gateways() -> None:
    """The same text and the same chat give the ids that a request would."""
    served = ServedModel(load_text_model(ENTRY))
    chat = [ChatMessage(role=message["role"], content=message["content"]) for message in MESSAGES]
    body = msgspec.json.encode({"model": "scripted", "messages": MESSAGES, "temperature": 0})
    assert text_ids(ENTRY, "Hello") == served.text_prompt("Hello")
    assert chat_ids(ENTRY, body) == served.chat_prompt(chat)
    assert chat_ids(ENTRY, b" " + msgspec.json.encode(MESSAGES)) == served.chat_prompt(chat)


@pytest.mark.parametrize("body", [b"", b"[]", b"[1]", b"{}", b'{"messages":[]}', b"\xff"])
def test_what_is_no_chat_is_refused(body: bytes) -> None:
    """As the gateway refuses it."""
    with pytest.raises(BadRequest):
        chat_ids(ENTRY, body)
