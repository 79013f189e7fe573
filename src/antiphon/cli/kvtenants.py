"""Tenants and the tags by which their blocks are found, for `antiphon kv`.

Both hang on the secret that gateways derive scopes from: these commands know tenants only where that
secret lies, in the state folder of a machine with a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from antiphon.cli.state import standing_secret, state_folder
from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.errors import BadRequest
from antiphon.core.scope import ScopeMaker
from antiphon.kv.keys import scope_tag

LOCAL_TENANT = "local"
PUBLIC = "(public)"  # blocks of the operator's public prefixes; no tenant can be called so
_SCOPE_SECRET = "scope-secret"


class Tenants:
    """The tenants known here, by name."""

    def __init__(self, maker: ScopeMaker, ids: Mapping[str, str]) -> None:
        """`ids`: by name."""
        self._maker = maker
        self._ids = ids
        self._names = {self.tag_of(name): name for name in ids}
        self._names[scope_tag(PUBLIC_SCOPE)] = PUBLIC

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Self:
        """Those of this machine. Raises BadRequest."""
        maker = ScopeMaker(standing_secret(state_folder(environ) / _SCOPE_SECRET))
        return cls(maker, {LOCAL_TENANT: LOCAL_TENANT})

    def scope_of(self, name: str) -> bytes:
        """The scope of a request of this tenant that narrows nothing. Raises BadRequest."""
        return self._maker.scope(self._id(name), cache_salt=None, prompt_cache_key=None)

    def tag_of(self, name: str) -> bytes:
        """What the keys of its blocks hold. Raises BadRequest."""
        return scope_tag(self._maker.tenant_part(self._id(name)))

    def name_of(self, tag: bytes) -> str:
        """The tenant's name; the tag in hex where it is not known here."""
        return self._names.get(tag, tag.hex())

    def _id(self, name: str) -> str:
        if name not in self._ids:
            known = ", ".join(sorted(self._ids))
            raise BadRequest(f"no tenant {name[:64]!r} is known here; there are {known}")
        return self._ids[name]
