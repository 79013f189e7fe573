"""Scopes: whose KV blocks are whose, as bytes that nobody outside can guess, choose or collide with.

A scope is a keyed hash of the tenant, then a keyed hash of the tenant and of what the client narrows
its requests by. Invariants: two tenants never share a scope, whatever their clients send; a client's
words only split its own tenant's scope further; equal words give equal scopes at every gateway with
the same secret. The first `TENANT_BYTES` are the tenant's in every narrowing, so that all a tenant
left anywhere can be found and erased.

Keeps no secret on disk and knows no tenants.
"""

from __future__ import annotations

from blake3 import blake3

TENANT_BYTES = 16
SCOPE_BYTES = 32
SECRET_BYTES = 32
_TENANT, _NARROWED = b"tenant", b"narrowed"
_ABSENT = 2**32 - 1  # as a length: no text is that long, so an absent word is not an empty one


class ScopeMaker:
    """Derives scopes from one secret."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: `SECRET_BYTES` bytes, the same at all gateways of a fleet."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a scope secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def scope(self, tenant_id: str, *, cache_salt: str | None, prompt_cache_key: str | None) -> bytes:
        """The scope of a request, `SCOPE_BYTES` long."""
        narrowed = self._digest(_NARROWED, tenant_id, cache_salt, prompt_cache_key)
        return self.tenant_part(tenant_id) + narrowed[: SCOPE_BYTES - TENANT_BYTES]

    def tenant_part(self, tenant_id: str) -> bytes:
        """What every scope of this tenant begins with, `TENANT_BYTES` long."""
        return self._digest(_TENANT, tenant_id)[:TENANT_BYTES]

    def _digest(self, kind: bytes, *words: str | None) -> bytes:
        message = bytearray(kind)
        for word in words:
            text = b"" if word is None else word.encode("utf-8", "surrogatepass")
            message += (_ABSENT if word is None else len(text)).to_bytes(4, "little") + text
        return blake3(message, key=self._secret).digest()


def tenant_part_of(scope: bytes) -> bytes:
    """The part of a scope that is the same for all requests of its tenant."""
    return scope[:TENANT_BYTES]
