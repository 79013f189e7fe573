"""Tenants and the tags by which their blocks are found, for `antiphon kv`.

A tag follows from a tenant's id, which lies in the gateways' database, and from the secret they derive
scopes from: with another secret the tags are others, and nothing is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

from antiphon.cli import database
from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.errors import BadRequest
from antiphon.core.scope import ScopeMaker
from antiphon.kv.keys import scope_tag
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.names import LOCAL_TENANT

PUBLIC = "(public)"  # blocks of the operator's public prefixes; no tenant can be called so


class Tenants:
    """The tenants known here, by name."""

    def __init__(self, maker: ScopeMaker, ids: Mapping[str, str]) -> None:
        """`ids`: by name."""
        self._maker = maker
        self._ids = ids
        self._names = {self.tag_of(name): name for name in ids}
        self._names[scope_tag(PUBLIC_SCOPE)] = PUBLIC

    @classmethod
    def load(cls, url: str, secret: bytes) -> Self:
        """Those of a database. Raises BadRequest, StoreUnavailable."""
        with database.told(url):
            ids = asyncio.run(_ids(url))
        return cls(ScopeMaker(secret), {LOCAL_TENANT: LOCAL_TENANT, **ids})

    def scope_of(self, name: str, *, cache_salt: str | None, prompt_cache_key: str | None) -> bytes:
        """The scope of a request of this tenant. Raises BadRequest."""
        return self._maker.scope(self._id(name), cache_salt=cache_salt, prompt_cache_key=prompt_cache_key)

    def tag_of(self, name: str) -> bytes:
        """What the keys of its blocks hold. Raises BadRequest."""
        return scope_tag(self._maker.tenant_part(self._id(name)))

    @staticmethod
    def tag_of_id(secret: bytes, tenant_id: str) -> bytes:
        """The same of a tenant that is known by its id, there or erased."""
        return scope_tag(ScopeMaker(secret).tenant_part(tenant_id))

    def name_of(self, tag: bytes) -> str:
        """The tenant's name; the tag in hex where it is not known here."""
        return self._names.get(tag, tag.hex())

    def _id(self, name: str) -> str:
        if name not in self._ids:
            known = ", ".join(sorted(self._ids))
            raise BadRequest(f"no tenant {name[:64]!r} is known here; there are {known}")
        return self._ids[name]


async def _ids(url: str) -> Mapping[str, str]:
    opened = await Database.open(url)
    try:
        return await KeyStore(opened).tenants()
    finally:
        await opened.close()
