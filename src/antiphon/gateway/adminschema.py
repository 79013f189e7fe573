"""The admin API's requests and answers, field for field.

Requests are strict: a field that is misspelt is an error, for it would be a limit less. In a change a field
that is left out stays as it is, and null takes a limit away.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from antiphon.core.generation import Priority
from antiphon.core.grant import Limits
from antiphon.store.grants import MAX_LIMIT, MOST_MODELS
from antiphon.store.keys import Key
from antiphon.store.names import LOCAL_TENANT
from antiphon.store.usagereport import UsageRecord, UsageTotal

Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]
Models = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MOST_MODELS)]
Class = Literal["interactive", "default", "batch"]

_CLASSES: Mapping[Priority, Class] = {
    Priority.INTERACTIVE: "interactive",
    Priority.DEFAULT: "default",
    Priority.BATCH: "batch",
}


class LimitsChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of a key."""

    requests_per_minute: Limit | UnsetType | None = UNSET
    tokens_per_minute: Limit | UnsetType | None = UNSET
    max_concurrent: Limit | UnsetType | None = UNSET
    tokens_per_day: Limit | UnsetType | None = UNSET
    tokens_per_month: Limit | UnsetType | None = UNSET


class KeyChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of PATCH /admin/keys/{id}: what the key allows from now on."""

    limits: LimitsChange = LimitsChange()
    models: Models | UnsetType | None = UNSET  # None: all
    priority: Class | UnsetType = UNSET
    is_admin: bool | UnsetType = UNSET


class NewKey(KeyChange, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/keys. A tenant that is new is made."""

    tenant: str = LOCAL_TENANT
    name: str = "key"


class NewTenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/tenants."""

    name: str


class KeyObject(Struct, frozen=True, kw_only=True):
    """A key. `key`, its text, is there when it was just made, and never again."""

    object: Literal["key"] = "key"
    id: str
    tenant: str
    name: str
    shown: str
    created_at: datetime.datetime
    last_used_at: datetime.datetime | None
    revoked_at: datetime.datetime | None
    limits: Limits  # those that there are
    models: tuple[str, ...] | None
    priority: Class
    is_admin: bool
    key: str | UnsetType = UNSET


def key_object(key: Key, text: str | None = None) -> KeyObject:
    """A key as the admin API and `antiphon keys --json` show it. `text`: where it was just made."""
    grant = key.grant
    return KeyObject(
        id=key.id,
        tenant=key.tenant,
        name=key.name,
        shown=key.shown,
        created_at=key.created_at,
        last_used_at=key.last_used_at,
        revoked_at=key.revoked_at,
        limits=grant.limits,
        models=grant.models,
        priority=_CLASSES[grant.priority],
        is_admin=grant.is_admin,
        key=UNSET if text is None else text,
    )


class KeyList(Struct, frozen=True):
    """Oldest first, revoked ones too."""

    data: list[KeyObject]
    object: Literal["list"] = "list"


class TenantObject(Struct, frozen=True, kw_only=True):
    """A tenant. `num_keys`: that work."""

    object: Literal["tenant"] = "tenant"
    id: str
    name: str
    created_at: datetime.datetime
    num_keys: int


class TenantList(Struct, frozen=True):
    """By name."""

    data: list[TenantObject]
    object: Literal["list"] = "list"


class UsageTotals(Struct, frozen=True):
    """Body of GET /admin/usage; as CSV, the same columns."""

    data: list[UsageTotal]
    object: Literal["list"] = "list"


class UsageRecords(Struct, frozen=True):
    """Body of GET /admin/usage/requests; as CSV, the same columns."""

    data: list[UsageRecord]
    object: Literal["list"] = "list"
