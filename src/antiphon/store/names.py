"""What tenants and keys may be called.

Names land in logs, on terminals and in JSON, so they hold nothing that could be mistaken there.
"""

from __future__ import annotations

import re

from antiphon.core.errors import BadRequest

LOCAL_TENANT = "local"  # of requests without a key, where none is needed; always there, its id too
MAX_TENANT_CHARACTERS = 63
MAX_NAME_CHARACTERS = 64

_TENANT = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{MAX_TENANT_CHARACTERS - 1}}}")


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so."""
    return _TENANT.fullmatch(name) is not None


def check_tenant(name: str) -> str:
    """The name, where it may be a tenant's. Raises BadRequest."""
    if not is_tenant(name):
        raise BadRequest(
            f"{name[:MAX_TENANT_CHARACTERS]!r} is no name for a tenant: take up to {MAX_TENANT_CHARACTERS} "
            "characters of a-z, 0-9, '.', '_' and '-', and begin with a letter or digit"
        )
    return name


def check_key_name(name: str) -> str:
    """The name, where it may be a key's. Raises BadRequest."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
        raise BadRequest(
            f"{name[:MAX_NAME_CHARACTERS]!r} is no name for a key: take 1 to {MAX_NAME_CHARACTERS} printable "
            "characters, without spaces at the ends"
        )
    return name
