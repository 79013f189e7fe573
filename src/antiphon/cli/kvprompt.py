"""A prompt's token ids, as the gateway makes them. Loads llama.cpp for its vocabularies."""

from __future__ import annotations

from antiphon.core.catalogue import ModelEntry
from antiphon.gateway.chat import chat_messages
from antiphon.gateway.parse import parse_chat
from antiphon.tokens.textmodel import load_text_model


def text_ids(entry: ModelEntry, text: str) -> list[int]:
    """Of a bare text. Raises BadRequest."""
    return load_text_model(entry).prompts.text(text)


def chat_ids(entry: ModelEntry, body: bytes) -> list[int]:
    """Of a body of /v1/chat/completions, or of its list of messages alone. Raises BadRequest."""
    if body.lstrip().startswith(b"["):
        body = b'{"model":"any","messages":' + body + b"}"
    return load_text_model(entry).prompts.chat(chat_messages(parse_chat(body).messages))
