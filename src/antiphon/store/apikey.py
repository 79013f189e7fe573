"""The form of a key: how it is made, recognised and turned into what is stored.

    sk-antiphon-<48 characters of A-Z a-z 0-9 _ ->     36 random bytes

A key is random through and through, so a plain hash of it cannot be searched: no salt, no slow hash.
Of its 288 bits 24 are shown in lists; more than 256 stay secret.
"""

from __future__ import annotations

import re
import secrets

from blake3 import blake3

PREFIX = "sk-antiphon-"
_RANDOM_BYTES = 36
_SHOWN_RANDOM_CHARACTERS = 4
_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{{_RANDOM_BYTES * 4 // 3}}}")
_CONTEXT = "antiphon 2026-11-30 api key digest v1"


def make_key() -> str:
    """A new key."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: str) -> bytes | None:
    """The 32 bytes a key is stored and found by; None for what cannot be one of our keys."""
    if _FORM.fullmatch(key) is None:
        return None
    return blake3(key.encode("ascii"), derive_key_context=_CONTEXT).digest()


def shown_of(key: str) -> str:
    """The beginning that tells keys apart in a list."""
    return key[: len(PREFIX) + _SHOWN_RANDOM_CHARACTERS]
