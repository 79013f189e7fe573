"""The models this gateway speaks for, and the routes that list them.

A served model is its text side only: vocabulary, template, context. A relayed model has not even that:
an upstream is sent its messages. Whether anybody computes one at the moment is the router's knowledge,
not this file's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon.core.catalogue import ModelEntry, RouteEntry
from antiphon.core.errors import BadRequest, ContextTooLong, NotFound
from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.gateway.account import account_of
from antiphon.gateway.publicprefix import PublicPrefixes
from antiphon.gateway.reply import Model, ModelList
from antiphon.router.targets import mirror_model, names_of, ordered_models
from antiphon.router.upstream import Upstream
from antiphon.tokens.template import ChatMessage
from antiphon.tokens.textmodel import TextModel, load_text_model
from antiphon.tokens.tokenizer import Tokenizer

_MAX_SHOWN = 100


class ServedModel:
    """One model. `control_ids` stand for no text."""

    def __init__(
        self,
        text: TextModel,
        aliases: Sequence[str] = (),
        public_systems: Sequence[str] = (),
        *,
        is_public: bool = True,
    ) -> None:
        """`public_systems`: system prompts whose KV all tenants may share. Raises BadRequest."""
        self.name = text.name
        self.is_public = is_public
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


class RelayedModel:
    """One model that an upstream serves by messages: its tokens are unknown here."""

    def __init__(self, entry: ModelEntry, upstream: Upstream) -> None:
        self.name = entry.name
        self.aliases = entry.aliases
        self.is_public = entry.public
        self.upstream = upstream


AnyModel: TypeAlias = ServedModel | RelayedModel


class ServedModels:
    """Models by name and alias, and the routes in front of them."""

    def __init__(self, models: Sequence[AnyModel], routes: Sequence[RouteEntry] = ()) -> None:
        """Raises BadRequest where a route names a model that is not here, or is called like one."""
        self._by_name = {name: model for model in models for name in (model.name, *model.aliases)}
        self._routes = names_of(routes)
        self._listed = [route.name for route in routes] + [model.name for model in models if model.is_public]
        self._created = int(time.time())
        for route in routes:
            for name in (route.name, *route.aliases):
                if name in self._by_name:
                    raise BadRequest(f"the name {name!r} is a route's and a model's")
            for name in route.models:
                if name not in self._by_name:
                    raise BadRequest(
                        f"route {route.name!r} names {name!r}, which this gateway does not serve"
                    )

    @classmethod
    def load(
        cls,
        entries: Sequence[ModelEntry],
        public_systems: Sequence[str] = (),
        routes: Sequence[RouteEntry] = (),
        upstreams: Mapping[str, Upstream] | None = None,
    ) -> ServedModels:
        """Load the text side of each entry that has one. Raises BadRequest."""
        return cls([_load(entry, public_systems, upstreams or {}) for entry in entries], routes)

    def choose(self, name: str, session: bytes, draw: float) -> list[AnyModel]:
        """The models that may answer to this name, best first; `draw` as for a route. Raises NotFound."""
        route = self._routes.get(name)
        if route is not None:
            return [self._by_name[model] for model in ordered_models(route, session, draw)]
        return [self._find(name)]

    def require(self, name: str) -> None:
        """Raises NotFound where nothing answers to this name."""
        if name not in self._routes:
            self._find(name)

    def mirror(self, name: str, draw: float) -> AnyModel | None:
        """The model that gets a copy of a request to this name, if there is one."""
        route = self._routes.get(name)
        model = None if route is None else mirror_model(route, draw)
        return None if model is None else self._by_name[model]

    def served(self, name: str) -> ServedModel:
        """The model of this name, which has a text side, public or not."""
        model = self._by_name[name]
        assert isinstance(model, ServedModel)
        return model

    def card(self, name: str) -> Model:
        """What clients see of one model or route. Raises NotFound."""
        route = self._routes.get(name)
        return Model(id=self._find(name).name if route is None else route.name, created=self._created)

    def cards(self, grant: Grant = FULL_GRANT) -> ModelList:
        """What clients see of all that they may use."""
        return ModelList(data=[self.card(name) for name in self._listed if grant.allows(name)])

    def _find(self, name: str) -> AnyModel:
        model = self._by_name.get(name)
        if model is None or not model.is_public:
            raise no_model(name)
        return model


def no_model(name: str) -> NotFound:
    """The error for a model that is not there, or not for this caller."""
    return NotFound(f"The model {name[:_MAX_SHOWN]!r} does not exist.", code="model_not_found", param="model")


def _load(entry: ModelEntry, public_systems: Sequence[str], upstreams: Mapping[str, Upstream]) -> AnyModel:
    if entry.upstream is not None and not entry.upstream.takes_ids:
        return RelayedModel(entry, upstreams[entry.name])
    text = load_text_model(entry)
    return ServedModel(text, entry.aliases, public_systems, is_public=entry.public)


class ListModels:
    """GET /v1/models: what this caller may use."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await json_response(self._models.cards(_grant(scope)))(scope, receive, send)


class ShowModel:
    """GET /v1/models/{model}: 404 for what this caller may not use; names may hold slashes."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"].removesuffix("/")
        if not _grant(scope).allows(name):
            raise no_model(name)
        await json_response(self._models.card(name))(scope, receive, send)


def _grant(scope: Scope) -> Grant:
    caller = account_of(scope).caller
    assert caller is not None  # CallerMiddleware: no request comes this far without one
    return caller.grant


def json_response(body: msgspec.Struct) -> Response:
    """200 with this body."""
    return Response(msgspec.json.encode(body), media_type="application/json")
