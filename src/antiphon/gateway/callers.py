"""Who is asking, and who may: the one place where that is decided.

    listens on   keys exist   no key    good key      other or revoked key
    loopback     no           `local`   –             `local`
    loopback     yes          `local`   its tenant    401
    elsewhere    yes          401       its tenant    401
    elsewhere    no           refused to start; behind a proxy that checks callers: `local`

Where the operator requires a key, everybody without a good one gets a 401, wherever it listens.

OpenAI's SDKs always send some key, so before the first key is created any is taken on loopback. A key
counts as existing when it is revoked too: revoking the last one opens nothing. Where the database does
not answer, a request that brings a key gets a 503.

Who needs no key on loopback is a program of this machine, not a page of somebody else's in its browser:
where Host or Origin say otherwise it is a 403, unless a proxy in front checks callers.

A client token is good while it has not ended and its key is good; it never may more than its key may then.
What begins like a token is one, or is wrong: also where any other key is taken.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

from antiphon.core.errors import BadRequest, Forbidden, Unauthorized
from antiphon.core.grant import FULL_GRANT, Grant, Meter
from antiphon.gateway.clienttokens import ClientTokens, is_client_token
from antiphon.gateway.cors import Origins
from antiphon.gateway.keyring import KeyRing
from antiphon.store.names import LOCAL_TENANT


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `key_id` None: it needed no key. `token` None: it showed the key itself."""

    tenant_id: str
    tenant: str
    key_id: str | None = None
    grant: Grant = FULL_GRANT
    token: Meter | None = None
    end_user: str | None = None  # what the key's holder calls the token's user; an identifier, no text

    @property
    def meters(self) -> tuple[Meter, ...]:
        """All that its requests are counted against, each with bounds of its own."""
        if self.key_id is None:
            return ()
        key = Meter(id=self.key_id, limits=self.grant.limits)
        return (key,) if self.token is None else (key, self.token)


LOCAL = Caller(LOCAL_TENANT, LOCAL_TENANT)
_PORT = re.compile(r":[0-9]+\Z")
_NO_KEY = "?"  # presented in another way than ours: never a good key, but not nothing either


class Callers:
    """Tells callers by what they present."""

    def __init__(
        self,
        ring: KeyRing,
        tokens: ClientTokens,
        origins: Origins,
        *,
        is_loopback: bool,
        behind_proxy: bool = False,
        require_key: bool = False,
    ) -> None:
        self._ring = ring
        self.tokens = tokens
        self.origins = origins
        self._is_loopback = is_loopback
        self._behind_proxy = behind_proxy
        self._require_key = require_key

    async def identify(self, scope: Scope) -> Caller:
        """Who sent this request. Raises Unauthorized, Forbidden, StoreUnavailable."""
        presented = _presented(scope)
        if presented == "":
            if not self._require_key and (self._is_loopback or not self._ring.has_keys):
                return self._local(scope)
            raise Unauthorized(
                "You did not provide an API key. Send it in the Authorization header: 'Authorization: Bearer "
                "YOUR_KEY'."
            )
        if is_client_token(presented):
            return await self._holder(presented)
        owner = await self._ring.owner(presented)
        if owner is not None and not owner.is_revoked:
            return Caller(owner.tenant_id, owner.tenant, owner.key_id, owner.grant)
        if owner is None and not self._require_key and not self._ring.has_keys:
            return self._local(scope)
        raise _wrong_key()

    def _local(self, scope: Scope) -> Caller:
        if self._is_loopback and not self._behind_proxy:
            _require_local(scope, self.origins)
        return LOCAL

    async def _holder(self, token: str) -> Caller:
        claims = self.tokens.read(token)
        owner = None if claims is None else await self._ring.owner_by_id(claims.key_id)
        if claims is None or owner is None or owner.is_revoked:
            raise _wrong_key()
        grant = claims.narrow(owner.grant)
        return Caller(owner.tenant_id, owner.tenant, owner.key_id, grant, claims.meter, claims.user)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_guard(host: str, *, has_keys: bool, behind_proxy: bool) -> None:
    """Raises BadRequest where others would reach a server that asks nobody for a key."""
    if not (is_loopback(host) or has_keys or behind_proxy):
        raise BadRequest(
            f"--host {host} would open the API to everyone who reaches this machine: there are no keys. "
            "Create one with: antiphon keys create. Or stay on 127.0.0.1, or put a proxy that checks callers "
            "in front and say --behind-proxy."
        )


def _require_local(scope: Scope, origins: Origins) -> None:
    """Raises Forbidden where a page asks that is not of this server or of an allowed origin.

    A page of a name that was pointed at this machine (DNS rebinding) shows that name as Host and Origin.
    """
    headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
    host = headers.get(b"host", "localhost")  # HTTP/1.0 comes without one
    if not is_loopback(_PORT.sub("", host).strip("[]")):
        raise Forbidden(
            "Without a key this server answers this machine alone, under its own address or as localhost. "
            "Send a key (antiphon keys create makes one)."
        )
    origin = headers.get(b"origin")
    if origin not in (None, f"http://{host}", f"https://{host}") and not origins.allow(origin or ""):
        raise Forbidden("Pages of this origin may not ask this server; its operator may allow some.")


def _wrong_key() -> Unauthorized:
    """The same words for everything wrong: they tell nobody which keys once worked."""
    return Unauthorized("Incorrect API key provided. Keys are made by the operator of this server.")


def _presented(scope: Scope) -> str:
    """The key in the Authorization header; empty where there is none."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    values = [value.decode("latin-1").strip() for name, value in headers if name == b"authorization"]
    if not any(values):
        return ""
    scheme, _, key = values[0].partition(" ")
    if len(values) == 1 and scheme.lower() == "bearer":
        return key.strip()
    return _NO_KEY
