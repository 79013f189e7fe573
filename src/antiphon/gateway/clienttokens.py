"""Client tokens: what a key's holder hands to a browser or a phone instead of the key.

    ant-ct-<base64url of: version, MAC, claims>     512 characters at most

A token says on whose behalf it is, what it may be used for and when it ends; the MAC makes that true at
every gateway that has the scope secret, so nothing is stored. Invariants: what is read here was sealed by
one of them, character for character, and has not ended; a token never outlives `MAX_MINUTES`. Whether its
key still stands, and what that key allows, is asked at each request: see callers.py.

Clocks: a token ends `LEEWAY_S` after the time it states, so that gateways whose clocks differ by less agree
on one that is good. Counting what it used up is the limiter's.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import msgspec
from blake3 import blake3

from antiphon.core.errors import BadRequest
from antiphon.core.grant import Grant, Limits, Meter

PREFIX = "ant-ct-"
MAX_CHARACTERS = 512
MAX_MINUTES = 60
LEEWAY_S = 30.0

_CONTEXT = "antiphon 2026-12-01 client token mac key v1"
_VERSION = b"\x01"
_MAC_BYTES = 32
_ID_BYTES = 8


class Claims(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a token says. None: no bound but the key's."""

    key_id: str
    id: str
    expires_at: int  # Unix time
    models: tuple[str, ...] | None = None
    max_tokens: int | None = None
    requests_per_minute: int | None = None
    user: str | None = None

    @property
    def meter(self) -> Meter:
        """What its requests are counted against, beside the key."""
        return Meter(
            id=self.id,
            limits=Limits(requests_per_minute=self.requests_per_minute),
            max_tokens=self.max_tokens,
            expires_at=self.expires_at + LEEWAY_S,
        )

    def narrow(self, grant: Grant) -> Grant:
        """What is left of its key's grant. The limits stay the key's: it counts those requests too."""
        models = self.models if self.models is not None else grant.models
        if models is not None:
            models = tuple(filter(grant.allows, models))
        return msgspec.structs.replace(grant, models=models, is_admin=False)


class ClientTokens:
    """Seals and reads tokens with one secret."""

    def __init__(self, secret: bytes, wall: Callable[[], float] = time.time) -> None:
        """`secret`: that of the scopes, the same at all gateways. `wall`: Unix time."""
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest()
        self._wall = wall
        self._claims = msgspec.msgpack.Decoder(Claims)

    def end_after(self, minutes: int) -> int:
        """When a token ends that is made now."""
        return int(self._wall()) + 60 * minutes

    def seal(self, claims: Claims) -> str:
        """The token. Raises BadRequest where it would be too long."""
        payload = msgspec.msgpack.encode(claims)
        text = PREFIX + _text_of(_VERSION + self._mac(payload) + payload)
        if len(text) > MAX_CHARACTERS:
            raise BadRequest(
                "Invalid value for 'models': their names are too long together for one token.", param="models"
            )
        return text

    def read(self, text: str) -> Claims | None:
        """What a token says; None for what is none of ours, or has ended."""
        sealed = _bytes_of(text)
        if sealed is None or not sealed.startswith(_VERSION):
            return None
        mac, payload = sealed[1 : 1 + _MAC_BYTES], sealed[1 + _MAC_BYTES :]
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        claims = self._claims.decode(payload)
        left_s = claims.expires_at + LEEWAY_S - self._wall()
        return claims if 0 < left_s <= 60 * MAX_MINUTES + 2 * LEEWAY_S else None

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, _VERSION + payload, hashlib.sha256)


def make_id() -> str:
    """The id of a new token."""
    return f"ct_{secrets.token_hex(_ID_BYTES)}"


def is_client_token(text: str) -> bool:
    """Whether it claims to be one; whether it is good is another matter."""
    return text.startswith(PREFIX)


def _text_of(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode("ascii")


def _bytes_of(text: str) -> bytes | None:
    """None where the text is not exactly what `_text_of` would make."""
    body = text.removeprefix(PREFIX)
    if len(text) > MAX_CHARACTERS or not body.isascii():
        return None
    try:
        sealed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        return None
    return sealed if _text_of(sealed) == body else None
