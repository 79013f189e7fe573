"""What both kinds of database do alike: transactions, migrations, faults, many processes at once."""

from __future__ import annotations

import asyncio
import datetime
import subprocess
import sys

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.exc import IntegrityError

from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.core.grant import FULL_GRANT, Grant, Limits
from antiphon.store import database as module
from antiphon.store.apikey import digest_of
from antiphon.store.database import Database, look
from antiphon.store.keys import KeyStore
from antiphon.store.migrate import migrate, migration_config
from antiphon.store.schema import Base, KeyRow, TenantRow

NOW = datetime.datetime(2026, 12, 1, 12, 30, 15, 123456, tzinfo=datetime.UTC)
EAST = datetime.timezone(datetime.timedelta(hours=8))
OF_FIRST_VERSION = {"id": "key_1", "tenant_id": "local", "name": "ключ", "digest": b"\0\xff", "shown": "s"}


@pytest.fixture
async def database(database_url: str) -> Database:
    """A new, open database."""
    opened = await Database.open(database_url)
    yield opened
    await opened.close()


async def _tenants(database: Database) -> list[str]:
    async with database.reading() as connection:
        return sorted((await connection.execute(select(TenantRow.name))).scalars())


def _tenant(name: str) -> dict[str, object]:
    return {"id": f"id-{name}", "name": name, "created_at": NOW}


async def test_transaction_is_whole_or_not_there(database: Database) -> None:
    """What fails inside a block leaves nothing behind."""
    with pytest.raises(ZeroDivisionError):
        async with database.writing() as connection:
            await connection.execute(insert(TenantRow).values(_tenant("t")))
            raise ZeroDivisionError
    assert await _tenants(database) == ["local"]


async def test_cancelled_transaction_leaves_nothing(database: Database) -> None:
    """Cancelling a writer in mid-transaction undoes it; its connection and its locks are free again."""
    is_inside = asyncio.Event()

    async def write() -> None:
        async with database.writing() as connection:
            await connection.execute(insert(TenantRow).values(_tenant("t")))
            is_inside.set()
            await asyncio.Event().wait()

    for _ in range(2 * module._NUM_CONNECTIONS):
        is_inside.clear()
        task = asyncio.create_task(write())
        await is_inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await _tenants(database) == ["local"]
    async with database.writing() as connection:
        await connection.execute(insert(TenantRow).values(_tenant("t")))
    assert await _tenants(database) == ["local", "t"]


async def test_reader_sees_one_moment(database: Database) -> None:
    """What others commit meanwhile does not show up between two queries of one reader."""
    async with database.reading() as connection:
        before = (await connection.execute(select(TenantRow.name))).scalars().all()
        async with database.writing() as writer:
            await writer.execute(insert(TenantRow).values(_tenant("t")))
        assert (await connection.execute(select(TenantRow.name))).scalars().all() == before
    assert await _tenants(database) == ["local", "t"]


async def test_broken_rules_are_the_writers_business(database: Database) -> None:
    """A name taken twice is no fault of the database, and the error repeats no values."""
    with pytest.raises(IntegrityError) as caught:
        async with database.writing() as connection:
            values = {"id": "secret-value", "name": "local", "created_at": NOW}
            await connection.execute(insert(TenantRow).values(values))
    assert "secret-value" not in str(caught.value)


async def test_keys_belong_to_tenants(database: Database) -> None:
    """A key whose tenant is not there cannot be written."""
    row = OF_FIRST_VERSION | {"tenant_id": "nobody", "created_at": NOW}
    with pytest.raises(IntegrityError):
        async with database.writing() as connection:
            await connection.execute(insert(KeyRow).values(row))


async def test_writers_that_overlap_all_come_through(database: Database) -> None:
    """More writers than connections, at once."""

    async def add(name: str) -> None:
        async with database.writing() as connection:
            await connection.execute(select(TenantRow.id))
            await connection.execute(insert(TenantRow).values(_tenant(name)))

    await asyncio.gather(*(add(f"t{number}") for number in range(20)))
    assert len(await _tenants(database)) == 21


async def test_all_connections_busy_is_said(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More readers than connections wait a while, then are told."""
    monkeypatch.setattr(module, "_NUM_CONNECTIONS", 1)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)
    database = await Database.open(database_url)
    async with database.reading():
        with pytest.raises(StoreUnavailable) as caught:
            async with database.reading():
                raise AssertionError("there was one connection")
    assert "busy" in caught.value.detail
    await database.close()


async def test_wrong_statement_is_not_repeated(database: Database) -> None:
    """What went wrong is for the operator; neither statement nor values are in any of it."""
    with pytest.raises(StoreUnavailable) as caught:
        async with database.reading() as connection:
            await connection.execute(text("SELECT :value FROM nowhere"), {"value": "hush"})
    assert "nowhere" in caught.value.detail
    for said in (str(caught.value), caught.value.detail):
        assert "SELECT" not in said
        assert "hush" not in said


async def test_times_come_back_aware(database: Database) -> None:
    """To the microsecond and in UTC, from whatever zone they went in."""
    async with database.writing() as connection:
        row = _tenant("t") | {"created_at": NOW.astimezone(EAST)}
        await connection.execute(insert(TenantRow).values(row))
    async with database.reading() as connection:
        found = (
            await connection.execute(select(TenantRow.created_at).where(TenantRow.name == "t"))
        ).scalar_one()
    assert found == NOW
    assert found.utcoffset() == datetime.timedelta(0)


async def test_tenant_made_by_many_is_one(database_url: str) -> None:
    """Keys made at the same time by several processes' connections for a new tenant share its id."""
    databases = [await Database.open(database_url) for _ in range(3)]
    stores = [KeyStore(database) for database in databases for _ in range(4)]
    made = await asyncio.gather(*(store.create("acme", f"k{n}") for n, store in enumerate(stores)))
    owners = [await stores[0].owner(digest_of(key) or b"") for _, key in made]
    assert len({owner.tenant_id for owner in owners if owner is not None}) == 1
    assert len(await stores[0].list("acme")) == len(stores)
    for database in databases:
        await database.close()


async def test_uses_noted_at_once_do_not_collide(database: Database) -> None:
    """Gateways note the same keys in other orders at the same time; none waits for another."""
    keys = KeyStore(database)
    ids = [(await keys.create("acme", f"k{n}"))[0].id for n in range(20)]
    await asyncio.gather(*(keys.mark_used(ids if n % 2 else ids[::-1], NOW) for n in range(8)))
    assert {key.last_used_at for key in await keys.list()} == {NOW}


async def test_changes_of_other_processes_show_at_once(database_url: str) -> None:
    """A grant that one process changes is what another reads next; so is a revoked key."""
    ours, theirs = await Database.open(database_url), await Database.open(database_url)
    key, _ = await KeyStore(ours).create("acme", "k")
    grant = Grant(limits=Limits(requests_per_minute=1), models=("m",))
    await KeyStore(theirs).change(key.id, grant)
    owner = await KeyStore(ours).owner_by_id(key.id)
    assert owner is not None
    assert (owner.grant, owner.is_revoked) == (grant, False)
    await KeyStore(theirs).revoke(key.id)
    owner = await KeyStore(ours).owner_by_id(key.id)
    assert owner is not None
    assert owner.is_revoked
    await ours.close()
    await theirs.close()


def _make_first_version(connection: Connection) -> None:
    config = migration_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "0001")


async def test_data_of_the_first_version_lives_on(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database made by the first version, with a key in it, has that key and all that it allowed."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "migrate", _make_first_version)
        old = await Database.open(database_url)
    columns = "id, tenant_id, name, digest, shown, created_at"
    values = ", ".join(f":{name}" for name in columns.split(", "))
    row = OF_FIRST_VERSION | {
        "created_at": NOW if "postgresql" in database_url else "2026-12-01 12:30:15.123456"
    }
    async with old.writing() as connection:
        await connection.execute(text(f"INSERT INTO api_keys ({columns}) VALUES ({values})"), row)
    await old.close()
    database = await Database.open(database_url)
    (key,) = await KeyStore(database).list()
    assert (key.id, key.name, key.created_at, key.grant) == ("key_1", "ключ", NOW, FULL_GRANT)
    owner = await KeyStore(database).owner(b"\0\xff")
    assert owner is not None
    assert (owner.tenant, owner.is_revoked, owner.grant) == ("local", False, FULL_GRANT)
    await database.close()


async def test_newer_database_is_left_alone(database_url: str) -> None:
    """A downgraded Antiphon does not touch what it does not know."""
    database = await Database.open(database_url)
    async with database.writing() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    with pytest.raises(BadRequest, match="newer Antiphon: 9999"):
        await Database.open(database_url)
    facts = await look(database_url)
    assert facts is not None
    assert (facts.schema, facts.is_newer) == ("9999", True)


async def test_many_open_a_new_database_at_once(database_url: str) -> None:
    """Whoever comes first makes the tables; all find them."""
    opened = await asyncio.gather(*(Database.open(database_url) for _ in range(8)))
    for database in opened:
        assert await _tenants(database) == ["local"]
        await database.close()


_OPENER = """
import asyncio, sys
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore

async def main():
    sys.stdin.readline()  # both have started
    database = await Database.open(sys.argv[1])
    await KeyStore(database).create("acme", "k")
    await database.close()

print("ready", flush=True)
asyncio.run(main())
"""


def test_processes_migrate_one_after_the_other(database_url: str) -> None:
    """Two processes that start together on a new database both work."""
    command_line = [sys.executable, "-c", _OPENER, database_url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command_line, text=True, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err

    async def keys() -> int:
        database = await Database.open(database_url)
        try:
            return len(await KeyStore(database).list("acme"))
        finally:
            await database.close()

    assert asyncio.run(keys()) == 2


async def test_steps_lead_to_the_tables(database: Database) -> None:
    """What the migrations made is what schema.py says, types and defaults too, on this kind of database."""

    def differences(connection: Connection) -> list[object]:
        options = {"compare_type": True, "compare_server_default": True}
        return compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata)

    async with database.reading() as connection:
        assert await connection.run_sync(differences) == []


async def test_steps_lead_back(database: Database) -> None:
    """Every step can be undone on this kind of database, and done again."""

    def undo(connection: Connection) -> list[str]:
        config = migration_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        return inspect(connection).get_table_names()

    async with database.writing() as connection:
        assert await connection.run_sync(undo) == ["alembic_version"]
        await connection.run_sync(migrate)
    assert await _tenants(database) == ["local"]
