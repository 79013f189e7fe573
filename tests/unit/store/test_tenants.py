"""Tenants made, listed and erased, in real databases of both kinds."""

from __future__ import annotations

import asyncio
import datetime

import pytest
from sqlalchemy import func, insert, inspect, select

from antiphon.core.errors import BadRequest, NotFound
from antiphon.store import tenants as module
from antiphon.store.apikey import digest_of
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from antiphon.store.schema import TENANT_TABLES, Base, ErasureRow, TenantRow, UsageRow
from antiphon.store.tenants import TenantStore

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
EVER = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
async def database(database_url: str) -> Database:
    """A new, open database."""
    opened = await Database.open(database_url)
    yield opened
    await opened.close()


async def _use(database: Database, tenant_id: str, num_rows: int, prefix: str = "r") -> None:
    """Requests of this tenant, in the usage."""
    common = {"tenant_id": tenant_id, "gateway_id": "g", "model": "m", "endpoint": "e", "opened_at": NOW}
    rows = [common | {"id": f"{prefix}-{tenant_id}-{number}"} for number in range(num_rows)]
    async with database.writing() as connection:
        await connection.execute(insert(UsageRow), rows)


async def test_tenants_are_made_and_listed(database: Database) -> None:
    """By name, with how many keys they have and how many of these work; a name is there once."""
    tenants, keys = TenantStore(database), KeyStore(database)
    made = await tenants.create("zeta")
    with pytest.raises(BadRequest, match="already"):
        await tenants.create("zeta")
    with pytest.raises(BadRequest, match="no name for a tenant"):
        await tenants.create("No Such")
    for name in ("acme", "acme", "zeta"):
        key, text = await keys.create(name, "k")
    await keys.revoke(key.id)
    listed = {tenant.name: tenant for tenant in await tenants.list()}
    assert list(listed) == ["acme", "local", "zeta"]
    assert (listed["zeta"].id, listed["zeta"].created_at) == (made.id, made.created_at)
    numbers = {name: (tenant.num_keys, tenant.num_all_keys) for name, tenant in listed.items()}
    assert numbers == {"acme": (2, 2), "local": (0, 0), "zeta": (0, 1)}
    owner = await keys.owner(digest_of(text) or b"")
    assert owner is not None
    assert owner.tenant_id == made.id  # a key of a tenant that was made before belongs to it


async def test_erased_tenant_is_gone_with_all_that_is_its(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys, its usage, in many statements, its name; nothing of others; a row without a name is left."""
    monkeypatch.setattr(module, "_ROWS_A_STATEMENT", 3)
    tenants, keys = TenantStore(database), KeyStore(database)
    _, text = await keys.create("acme", "k")
    await keys.create("acme", "k2")
    other, other_text = await keys.create("zeta", "k")
    acme, zeta = await tenants.find("acme"), await tenants.find("zeta")
    await _use(database, acme, 10)
    await _use(database, zeta, 2)
    assert await tenants.count(acme) == {"usage": 10, "api_keys": 2}
    erasure = await tenants.erase(acme)
    assert (erasure.tenant_id, erasure.removed) == (acme, {"usage": 10, "api_keys": 2})
    assert await keys.owner(digest_of(text) or b"") is None
    assert await keys.list() == [other]
    assert await keys.owner(digest_of(other_text) or b"") is not None
    assert await tenants.count(acme) == {"usage": 0, "api_keys": 0}
    assert await tenants.count(zeta) == {"usage": 2, "api_keys": 1}
    assert [tenant.name for tenant in await tenants.list()] == ["local", "zeta"]
    assert await tenants.erasures(EVER, 10) == [erasure]
    async with database.reading() as connection:
        (left,) = (await connection.execute(select(ErasureRow.__table__))).all()
    assert "acme" not in str(left)


async def test_name_of_an_erased_tenant_is_another_tenant(database: Database) -> None:
    """Who takes the name gets another id, and so another scope; the old one is found by its id."""
    tenants, keys = TenantStore(database), KeyStore(database)
    await keys.create("acme", "k")
    old = await tenants.find("acme")
    await tenants.erase(old)
    with pytest.raises(NotFound):
        await tenants.find("acme")
    await keys.create("acme", "k")
    assert await tenants.find("acme") != old
    assert await tenants.find(old) == old


async def test_erasing_again_takes_what_has_come_since(database: Database) -> None:
    """Gateways that did not know yet wrote usage: a sweep, and a second erasure, remove it."""
    tenants = TenantStore(database)
    tenant = await tenants.create("acme")
    first = await tenants.erase(tenant.id)
    await _use(database, tenant.id, 2)
    assert await tenants.sweep(tenant.id) == {"usage": 2, "api_keys": 0}
    await _use(database, tenant.id, 1)
    second = await tenants.erase(await tenants.find(tenant.id))
    assert second.removed == {"usage": 1, "api_keys": 0}
    assert {erasure.id for erasure in await tenants.erasures(EVER, 10)} == {first.id, second.id}
    assert await tenants.erasures(EVER, 1) == [second]
    assert await tenants.erasures(second.erased_at + datetime.timedelta(seconds=1), 10) == []


async def test_local_tenant_stays(database: Database) -> None:
    """Requests without a key need it; what is its goes."""
    tenants, keys = TenantStore(database), KeyStore(database)
    await keys.create("local", "k")
    await _use(database, "local", 3)
    assert (await tenants.erase("local")).removed == {"usage": 3, "api_keys": 1}
    assert [(tenant.id, tenant.name) for tenant in await tenants.list()] == [("local", "local")]


async def test_erasing_the_last_key_opens_nothing(database: Database) -> None:
    """A gateway that starts later still knows that there were keys; a tenant without one says nothing."""
    tenants, keys = TenantStore(database), KeyStore(database)
    await tenants.erase((await tenants.create("empty")).id)
    assert not await keys.has_any()
    await keys.create("acme", "k")
    await tenants.erase(await tenants.find("acme"))
    assert await keys.list() == []
    assert await keys.has_any()


@pytest.mark.parametrize("name", ["", "nobody", "tenant_0123456789abcdef", "\0", "\ud800", "%", "Acme"])
async def test_unknown_tenants_are_not_found(database: Database, name: str) -> None:
    """However it is spelled."""
    with pytest.raises(NotFound, match="there is no tenant"):
        await TenantStore(database).find(name)


async def test_keys_made_while_a_tenant_is_erased_are_whole(database: Database) -> None:
    """Each key that was made belongs to a tenant that is there, before or after."""
    tenants, keys = TenantStore(database), KeyStore(database)
    await keys.create("acme", "k")
    old = await tenants.find("acme")

    async def erase() -> None:
        await tenants.erase(old)

    made = await asyncio.gather(
        *(keys.create("acme", f"k{n}") for n in range(3)),
        erase(),
        *(keys.create("acme", f"l{n}") for n in range(3)),
    )
    owners = [await keys.owner(digest_of(one[1]) or b"") for one in made if one is not None]
    left = {owner.tenant_id for owner in owners if owner is not None}
    assert old not in left
    assert len(left) <= 1
    listed = await tenants.list()
    assert left <= {tenant.id for tenant in listed}


async def test_failed_erasure_changes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks in the middle leaves the tenant as it was, and no trace of an erasure."""
    tenants, keys = TenantStore(database), KeyStore(database)
    await keys.create("acme", "k")
    acme = await tenants.find("acme")

    def broken(removed: dict[str, int]) -> bytes:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(module.msgspec.json, "encode", broken)
        await tenants.erase(acme)
    assert await tenants.count(acme) == {"usage": 0, "api_keys": 1}
    assert await tenants.find("acme") == acme
    assert await tenants.erasures(EVER, 10) == []


def test_every_table_of_tenants_is_erased() -> None:
    """A table that names tenants and is not gone through would keep their data for ever."""
    named = {table.__tablename__ for table in TENANT_TABLES}
    with_tenants = {name for name, table in Base.metadata.tables.items() if "tenant_id" in table.columns}
    assert with_tenants - {ErasureRow.__tablename__} == named


async def test_nothing_else_in_the_database_names_a_tenant(database: Database) -> None:
    """After an erasure no row of any table holds the tenant's name or key."""
    tenants, keys = TenantStore(database), KeyStore(database)
    key, _ = await keys.create("unforgettable", "unforgettable too")
    await _use(database, await tenants.find("unforgettable"), 3)
    await tenants.erase(await tenants.find("unforgettable"))
    async with database.reading() as connection:
        for table in Base.metadata.sorted_tables:
            rows = (await connection.execute(select(table))).all()
            assert "unforgettable" not in str(rows)
            assert key.id not in str(rows)
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        assert set(names) - {"alembic_version"} == set(Base.metadata.tables)
        assert (await connection.execute(select(func.count()).select_from(TenantRow))).scalar_one() == 1
