"""Tenants in the database: made, listed, and erased with all that is theirs.

Invariants: an erasure is whole or did not happen; it leaves one row that says when and how much, and no
name. The id of an erased tenant is never used again. The tenant `local`, of requests without a key, loses
its data like any other, but is there again at once: it always is. What lies outside the database (KV,
memory of workers) is for others to remove; `erasures` tells them.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import delete, func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from antiphon.core.errors import BadRequest, NotFound
from antiphon.store.database import Database
from antiphon.store.names import LOCAL_TENANT, check_tenant, is_tenant
from antiphon.store.schema import TENANT_TABLES, ErasureRow, KeyRow, TenantRow

ID_BYTES = 8
_ROWS_A_STATEMENT = 5000  # a statement takes no longer than others, however much there is to remove
_REMOVED = msgspec.json.Decoder(dict[str, int])


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as it is listed. `num_keys`: that work, of `num_all_keys`."""

    id: str
    name: str
    created_at: datetime.datetime
    num_keys: int
    num_all_keys: int


@dataclass(frozen=True, slots=True)
class Erasure:
    """What is left of a tenant. `removed`: rows by table."""

    id: str
    tenant_id: str
    erased_at: datetime.datetime
    removed: dict[str, int]


def make_tenant_id() -> str:
    """A new id. Knowing one gives nothing: scopes are derived from it with a secret."""
    return f"tenant_{secrets.token_hex(ID_BYTES)}"


class TenantStore:
    """The tenants of one database. Every method raises StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str) -> Tenant:
        """A new tenant, without keys. Raises BadRequest where there is one of this name."""
        check_tenant(name)
        made = Tenant(make_tenant_id(), name, _now(), 0, 0)
        row = {"id": made.id, "name": name, "created_at": made.created_at}
        try:
            async with self._database.writing() as connection:
                await connection.execute(insert(TenantRow).values(row))
        except IntegrityError as error:
            raise BadRequest(f"there is a tenant {name!r} already") from error
        return made

    async def list(self) -> Sequence[Tenant]:
        """All of them, by name."""
        works = func.count(KeyRow.id).filter(KeyRow.revoked_at.is_(None))
        query = (
            select(TenantRow.id, TenantRow.name, TenantRow.created_at, works, func.count(KeyRow.id))
            .outerjoin(KeyRow, KeyRow.tenant_id == TenantRow.id)
            .group_by(TenantRow.id, TenantRow.name, TenantRow.created_at)
            .order_by(TenantRow.name)
        )
        async with self._database.reading() as connection:
            return [Tenant(*row) for row in await connection.execute(query)]

    async def find(self, name: str) -> str:
        """The id of the tenant of this name; an erased one is found by its id alone. Raises NotFound."""
        if is_tenant(name):  # ids look like names
            by_name = select(TenantRow.id).where(TenantRow.name == name)
            erased = select(ErasureRow.tenant_id).where(ErasureRow.tenant_id == name).limit(1)
            async with self._database.reading() as connection:
                for query in (by_name, erased):
                    found = (await connection.execute(query)).scalar_one_or_none()
                    if found is not None:
                        return found
        raise NotFound(f"there is no tenant {name[:64]!r}, and none of this id was erased")

    async def count(self, tenant_id: str) -> dict[str, int]:
        """How many rows of each table are the tenant's."""
        async with self._database.reading() as connection:
            return {
                table.__tablename__: (
                    await connection.execute(
                        select(func.count()).select_from(table).where(table.tenant_id == tenant_id)
                    )
                ).scalar_one()
                for table in TENANT_TABLES
            }

    async def erase(self, tenant_id: str) -> Erasure:
        """Remove all rows of a tenant and the tenant. Once more: what has come since, of one erased."""
        async with self._database.writing() as connection:
            # Held first: keys that are being made wait, and then find no tenant.
            await connection.execute(select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update())
            removed = await _remove(connection, tenant_id)
            erasure = Erasure(f"erasure_{secrets.token_hex(ID_BYTES)}", tenant_id, _now(), removed)
            row = {
                "id": erasure.id,
                "tenant_id": tenant_id,
                "erased_at": erasure.erased_at,
                "num_keys": removed[KeyRow.__tablename__],
                "removed": msgspec.json.encode(removed).decode(),
            }
            await connection.execute(insert(ErasureRow).values(row))
        return erasure

    async def sweep(self, tenant_id: str) -> dict[str, int]:
        """Remove what gateways wrote after the tenant was erased, before they knew; rows by table."""
        async with self._database.writing() as connection:
            return await _remove(connection, tenant_id)

    async def erasures(self, since: datetime.datetime, most: int) -> Sequence[Erasure]:
        """The latest since then, newest first."""
        columns = (ErasureRow.id, ErasureRow.tenant_id, ErasureRow.erased_at, ErasureRow.removed)
        query = select(*columns).where(ErasureRow.erased_at >= since)
        query = query.order_by(ErasureRow.erased_at.desc(), ErasureRow.id).limit(most)
        async with self._database.reading() as connection:
            return [Erasure(*row[:3], _REMOVED.decode(row[3])) for row in await connection.execute(query)]


async def _remove(connection: AsyncConnection, tenant_id: str) -> dict[str, int]:
    removed = {}
    for table in TENANT_TABLES:
        some = select(table.id).where(table.tenant_id == tenant_id).limit(_ROWS_A_STATEMENT)
        num_rows = 0
        while num_some := (await connection.execute(delete(table).where(table.id.in_(some)))).rowcount:
            num_rows += num_some
        removed[table.__tablename__] = num_rows
    if tenant_id != LOCAL_TENANT:
        await connection.execute(delete(TenantRow).where(TenantRow.id == tenant_id))
    return removed


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
