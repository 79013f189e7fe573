"""A prompt as the gateway makes it of a request. Loads llama.cpp for its vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.cli.kvchain import Prompt
from antiphon.core.catalogue import ModelEntry
from antiphon.gateway.chat import chat_messages
from antiphon.gateway.models import ServedModel
from antiphon.gateway.parse import parse_chat
from antiphon.tokens.textmodel import load_text_model


def text_prompt(entry: ModelEntry, public_systems: Sequence[str], text: str) -> Prompt:
    """Of a bare text. Raises BadRequest."""
    model = _model(entry, public_systems)
    ids = model.text_prompt(text)
    return Prompt(ids, model.num_public_tokens(ids))


def chat_prompt(entry: ModelEntry, public_systems: Sequence[str], body: bytes) -> Prompt:
    """Of a body of /v1/chat/completions, or of its list of messages alone. Raises BadRequest."""
    if body.lstrip().startswith(b"["):
        body = b'{"model":"any","messages":' + body + b"}"
    request = parse_chat(body)
    model = _model(entry, public_systems)
    ids = model.chat_prompt(chat_messages(request.messages))
    # An empty key is none, as it is to the gateway.
    return Prompt(ids, model.num_public_tokens(ids), request.cache_salt, request.prompt_cache_key or None)


def _model(entry: ModelEntry, public_systems: Sequence[str]) -> ServedModel:
    return ServedModel(load_text_model(entry), entry.aliases, public_systems)
