"""The models this gateway speaks for, and the routes that list them.

A served model is its text side only: vocabulary, template, context. Whether a worker computes it at
the moment is the dispatcher's knowledge, not this file's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import ContextTooLong, NotFound
from antiphon.gateway.publicprefix import PublicPrefixes
from antiphon.gateway.reply import Model, ModelList
from antiphon.tokens.template import ChatMessage
from antiphon.tokens.textmodel import TextModel, load_text_model
from antiphon.tokens.tokenizer import Tokenizer

_MAX_SHOWN = 100


class ServedModel:
    """One model. `control_ids` stand for no text."""

    def __init__(
        self, text: TextModel, aliases: Sequence[str] = (), public_systems: Sequence[str] = ()
    ) -> None:
        """`public_systems`: system prompts whose KV all tenants may share. Raises BadRequest."""
        self.name = text.name
        self.aliases = tuple(aliases)
        self.context_tokens = text.context_tokens
        self.tokenizer: Tokenizer = text.tokenizer
        self.control_ids = frozenset(text.tokenizer.special_tokens.values())
        self._prompts = text.prompts
        self._public = PublicPrefixes.of_systems(public_systems, text.prompts.chat)
        self._longest_piece = max(len(self.tokenizer.piece(i)) for i in range(self.tokenizer.vocab_size))

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a rendered chat. Raises BadRequest."""
        self._check_length(sum(len(message.content) for message in messages), "messages")
        return self._prompts.chat(messages)

    def text_prompt(self, text: str) -> list[int]:
        """Ids of plain text. Raises BadRequest."""
        self._check_length(len(text), "prompt")
        return self._prompts.text(text)

    def num_public_tokens(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of a prompt the operator has made public."""
        return self._public.num_public(prompt)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text that ids stand for. Raises IndexError outside the vocabulary."""
        return b"".join(map(self.tokenizer.piece, ids)).decode("utf-8", errors="replace")

    def _check_length(self, num_characters: int, param: str) -> None:
        # Tokenising is paid for by every open stream, so hopeless lengths do not get that far.
        least = num_characters // self._longest_piece
        if least > self.context_tokens:
            raise context_too_long(self.context_tokens, f"at least {least}", param)


def context_too_long(context_tokens: int, needed: str, param: str) -> ContextTooLong:
    """The error whose words clients look for."""
    return ContextTooLong(
        f"This model's maximum context length is {context_tokens} tokens. However, your {param} resulted "
        f"in {needed} tokens. Please reduce the length of the {param}.",
        param=param,
    )


class ServedModels:
    """Models by name and alias."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = list(models)
        self._by_name = {name: model for model in models for name in (model.name, *model.aliases)}
        self._created = int(time.time())

    @classmethod
    def load(cls, entries: Sequence[ModelEntry], public_systems: Sequence[str] = ()) -> ServedModels:
        """Load the text side of each entry. Raises BadRequest."""
        return cls([ServedModel(load_text_model(e), e.aliases, public_systems) for e in entries])

    def find(self, name: str) -> ServedModel:
        """The model of this name or alias. Raises NotFound."""
        model = self._by_name.get(name)
        if model is None:
            raise NotFound(
                f"The model {name[:_MAX_SHOWN]!r} does not exist.", code="model_not_found", param="model"
            )
        return model

    def card(self, model: ServedModel) -> Model:
        """What clients see of one model."""
        return Model(id=model.name, created=self._created)

    def cards(self) -> ModelList:
        """What clients see of all."""
        return ModelList(data=[self.card(model) for model in self._models])


class ListModels:
    """GET /v1/models"""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await json_response(self._models.cards())(scope, receive, send)


class ShowModel:
    """GET /v1/models/{model}; names may hold slashes."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._models.find(scope["path_params"]["model"].removesuffix("/"))
        await json_response(self._models.card(model))(scope, receive, send)


def json_response(body: msgspec.Struct) -> Response:
    """200 with this body."""
    return Response(msgspec.json.encode(body), media_type="application/json")
