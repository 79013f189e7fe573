"""What the holder of a key may ask for, and how much. Pure values; who enforces them is the gateway's.

Invariants: None is "no limit"; nothing a client sends widens a grant.
"""

from __future__ import annotations

import msgspec

from antiphon.core.generation import Priority


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds of one key. Tokens are those of prompts and answers together. None: no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None  # requests that are being answered
    tokens_per_day: int | None = None  # days and months are those of UTC
    tokens_per_month: int | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether there is any bound at all."""
        return self != NO_LIMITS


NO_LIMITS = Limits()


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """All that a key says about its holder's requests.

    `priority`: the most urgent class it may ask for, and the one it gets where it asks for none.
    """

    limits: Limits = NO_LIMITS
    models: tuple[str, ...] | None = None  # public names that it may use; None: all
    priority: Priority = Priority.INTERACTIVE
    is_admin: bool = False  # may use the admin API; says nothing about models

    def allows(self, model: str) -> bool:
        """Whether requests may name this model."""
        return self.models is None or model in self.models


FULL_GRANT = Grant()


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """Something that requests are counted against: a key, or a client token made on its behalf."""

    id: str
    limits: Limits
    max_tokens: int | None = None  # over its whole life, prompts and answers together
    expires_at: float | None = None  # Unix time from which no request comes any more; None: never
