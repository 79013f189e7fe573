"""POST /v1/client_tokens: a key's holder makes a token that may do less than the key, for minutes.

Nothing is stored: see clienttokens.py. Invariants: a token names only models that its key may use when it
is made; making one is a key's alone (`Access.KEY`), so tokens make no tokens.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from antiphon.gateway.account import account_of
from antiphon.gateway.clienttokens import Claims, ClientTokens, make_id
from antiphon.gateway.models import ServedModels, json_response, no_model
from antiphon.gateway.parse import parse_client_token, read_body
from antiphon.gateway.reply import ClientToken

_MAX_BODY_BYTES = 64 * 2**10


class MintClientToken:
    """The endpoint."""

    def __init__(self, tokens: ClientTokens, models: ServedModels) -> None:
        self._tokens = tokens
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = account_of(scope).caller
        assert caller is not None  # Access.KEY
        assert caller.key_id is not None
        request = parse_client_token(await read_body(scope, receive, _MAX_BODY_BYTES))
        for model in request.models or ():
            if not caller.grant.allows(model):
                raise no_model(model)
            self._models.require(model)
        claims = Claims(
            key_id=caller.key_id,
            id=make_id(),
            expires_at=self._tokens.end_after(request.minutes),
            models=None if request.models is None else tuple(dict.fromkeys(request.models)),
            max_tokens=request.max_tokens,
            requests_per_minute=request.requests_per_minute,
            user=request.user,
        )
        made = ClientToken(
            id=claims.id,
            token=self._tokens.seal(claims),
            expires_at=claims.expires_at,
            models=claims.models,
            max_tokens=claims.max_tokens,
            requests_per_minute=claims.requests_per_minute,
            user=claims.user,
        )
        response = json_response(made)
        response.headers["cache-control"] = "no-store"
        await response(scope, receive, send)
