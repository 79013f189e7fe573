"""Keys and their tenants in the database.

Invariants: a key is seen once, by who creates it; a revoked key stays revoked; a tenant comes into
being with its first key. Who may call with a key is the gateway's to decide, and to remember for a while.
"""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, Update, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from antiphon.core.errors import NotFound
from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.store.apikey import digest_of, make_key, shown_of
from antiphon.store.database import Database
from antiphon.store.grants import GRANT_COLUMNS, columns_of, grant_of
from antiphon.store.names import check_key_name, check_tenant, is_tenant
from antiphon.store.schema import ErasureRow, KeyRow, TenantRow
from antiphon.store.tenants import make_tenant_id

_ID_BYTES = 8
_ID = re.compile(rf"key_[0-9a-f]{{{2 * _ID_BYTES}}}")
_IDS_A_STATEMENT = 500  # databases bound the number of values in one


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is listed. Times are aware, in UTC."""

    id: str
    tenant: str
    name: str
    shown: str
    created_at: datetime.datetime
    last_used_at: datetime.datetime | None
    revoked_at: datetime.datetime | None
    grant: Grant = FULL_GRANT


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """What a presented key turns out to be."""

    key_id: str
    tenant_id: str
    tenant: str
    is_revoked: bool
    grant: Grant = FULL_GRANT


class KeyStore:
    """The keys of one database. Every method raises StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, tenant: str, name: str, grant: Grant = FULL_GRANT) -> tuple[Key, str]:
        """A new key and its text, which is nowhere else from now on. Raises BadRequest."""
        check_tenant(tenant)
        check_key_name(name)
        text = make_key()
        now = _now()
        row = {
            "id": f"key_{secrets.token_hex(_ID_BYTES)}",
            "name": name,
            "digest": digest_of(text),
            "shown": shown_of(text),
            "created_at": now,
            **columns_of(grant),
        }
        async with self._database.writing() as connection:
            row["tenant_id"] = await _tenant_id(connection, tenant)
            await connection.execute(insert(KeyRow).values(row))
        return Key(row["id"], tenant, name, shown_of(text), now, None, None, grant), text

    async def list(self, tenant: str | None = None) -> Sequence[Key]:
        """All keys, or a tenant's, oldest first."""
        query = _keys().order_by(KeyRow.created_at, KeyRow.id)
        if tenant is not None:
            if not is_tenant(tenant):  # databases do not take every text there is
                return []
            query = query.where(TenantRow.name == tenant)
        async with self._database.reading() as connection:
            return [_key_of(row) for row in await connection.execute(query)]

    async def find(self, key_id: str) -> Key:
        """The key of this id. Raises NotFound."""
        _check_id(key_id)
        async with self._database.reading() as connection:
            return await _find(connection, key_id)

    async def change(self, key_id: str, grant: Grant) -> Key:
        """Give a key another grant, whole. Raises NotFound, BadRequest."""
        return await self._update(key_id, update(KeyRow).values(columns_of(grant)))

    async def revoke(self, key_id: str) -> Key:
        """End a key; one that has ended already stays as it is. Raises NotFound."""
        ending = update(KeyRow).where(KeyRow.revoked_at.is_(None)).values(revoked_at=_now())
        return await self._update(key_id, ending)

    async def owner(self, digest: bytes) -> KeyOwner | None:
        """Whose key has this digest; revoked ones too."""
        return await self._owner(_owners().where(KeyRow.digest == digest))

    async def owner_by_id(self, key_id: str) -> KeyOwner | None:
        """Whose key has this id; revoked ones too. For what was made on behalf of a key."""
        if _ID.fullmatch(key_id) is None:
            return None
        return await self._owner(_owners().where(KeyRow.id == key_id))

    async def has_any(self) -> bool:
        """Whether there ever was a key; revoked ones count, and those of erased tenants."""
        queries = (select(KeyRow.id), select(ErasureRow.id).where(ErasureRow.num_keys > 0))
        async with self._database.reading() as connection:
            for query in queries:
                if (await connection.execute(query.limit(1))).first() is not None:
                    return True
        return False

    async def tenants(self) -> Mapping[str, str]:
        """The ids of all tenants, by name."""
        async with self._database.reading() as connection:
            rows = await connection.execute(select(TenantRow.name, TenantRow.id))
            return {name: tenant_id for name, tenant_id in rows}

    async def mark_used(self, key_ids: Collection[str], at: datetime.datetime) -> None:
        """Note that these keys were used about then; not of those that somebody else changes just now."""
        ids = sorted(key_ids)
        async with self._database.writing() as connection:
            for start in range(0, len(ids), _IDS_A_STATEMENT):
                some = KeyRow.id.in_(ids[start : start + _IDS_A_STATEMENT])
                free = select(KeyRow.id).where(some).with_for_update(skip_locked=True)
                await connection.execute(update(KeyRow).where(KeyRow.id.in_(free)).values(last_used_at=at))

    async def _update(self, key_id: str, change: Update) -> Key:
        _check_id(key_id)
        async with self._database.writing() as connection:
            await connection.execute(change.where(KeyRow.id == key_id))
            return await _find(connection, key_id)

    async def _owner(self, query: Select[*tuple[Any, ...]]) -> KeyOwner | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        return KeyOwner(row.id, row.tenant_id, row.tenant, row.revoked_at is not None, grant_of(row))


def _keys() -> Select[*tuple[Any, ...]]:
    return select(
        KeyRow.id,
        TenantRow.name.label("tenant"),
        KeyRow.name,
        KeyRow.shown,
        KeyRow.created_at,
        KeyRow.last_used_at,
        KeyRow.revoked_at,
        *GRANT_COLUMNS,
    ).join(TenantRow, TenantRow.id == KeyRow.tenant_id)


def _key_of(row: Row[*tuple[Any, ...]]) -> Key:
    times = (row.created_at, row.last_used_at, row.revoked_at)
    return Key(row.id, row.tenant, row.name, row.shown, *times, grant_of(row))


def _owners() -> Select[*tuple[Any, ...]]:
    return select(
        KeyRow.id, KeyRow.tenant_id, TenantRow.name.label("tenant"), KeyRow.revoked_at, *GRANT_COLUMNS
    ).join(TenantRow, TenantRow.id == KeyRow.tenant_id)


async def _find(connection: AsyncConnection, key_id: str) -> Key:
    row = (await connection.execute(_keys().where(KeyRow.id == key_id))).one_or_none()
    if row is None:
        raise _no_key(key_id)
    return _key_of(row)


def _check_id(key_id: str) -> None:
    """Databases do not take every text there is: what cannot be an id is not asked for. Raises NotFound."""
    if _ID.fullmatch(key_id) is None:
        raise _no_key(key_id)


def _no_key(key_id: str) -> NotFound:
    return NotFound(f"there is no key with the id {key_id[:64]!r}")


async def _tenant_id(connection: AsyncConnection, name: str) -> str:
    """The id of the tenant of this name, made where there is none."""
    # Held until the key is there: a tenant is not erased meanwhile.
    find = select(TenantRow.id).where(TenantRow.name == name).with_for_update(read=True, key_share=True)
    found = (await connection.execute(find)).scalar_one_or_none()
    if found is not None:
        return found
    made = make_tenant_id()
    try:
        async with connection.begin_nested():
            await connection.execute(insert(TenantRow).values(id=made, name=name, created_at=_now()))
    except IntegrityError:  # made by somebody else meanwhile
        return (await connection.execute(find)).scalar_one()
    return made


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
