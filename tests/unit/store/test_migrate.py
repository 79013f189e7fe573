"""The schema's history and the tables as Python sees them are the same thing, on both databases."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from antiphon.core.grant import FULL_GRANT
from antiphon.store.grants import GRANT_COLUMNS, grant_of
from antiphon.store.migrate import NewerSchema, migrate, migration_config
from antiphon.store.schema import Base, KeyRow


@pytest.fixture
def connection(tmp_path: Path) -> Connection:
    """A connection to a new, empty file."""
    engine = create_engine(f"sqlite:///{tmp_path / 'keys.db'}")
    connection = engine.connect()
    yield connection
    connection.close()
    engine.dispose()


def test_steps_lead_to_the_tables(connection: Connection) -> None:
    """After all steps there is nothing that the tables in schema.py have and the database has not."""
    migrate(connection)
    options = {"compare_type": True, "compare_server_default": True}
    assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []


def test_migrating_twice_changes_nothing(connection: Connection) -> None:
    """A database that is up to date is left as it is."""
    migrate(connection)
    before = inspect(connection).get_table_names()
    migrate(connection)
    assert inspect(connection).get_table_names() == before


def test_steps_lead_back(connection: Connection) -> None:
    """Every step can be undone."""
    migrate(connection)
    config = migration_config()
    config.attributes["connection"] = connection
    command.downgrade(config, "base")
    assert inspect(connection).get_table_names() == ["alembic_version"]


def test_unknown_version_is_refused(connection: Connection) -> None:
    """What a newer Antiphon made is not touched."""
    migrate(connection)
    connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'x'")
    with pytest.raises(NewerSchema, match="x"):
        migrate(connection)


def test_history_is_one_line() -> None:
    """No two steps follow the same one."""
    scripts = ScriptDirectory.from_config(migration_config())
    assert len(scripts.get_heads()) == 1
    assert [s.revision for s in scripts.walk_revisions()][-1] == "0001"


def test_steps_speak_postgresql() -> None:
    """The same steps make PostgreSQL's tables: aware times, bytes, named constraints."""
    sql = io.StringIO()
    options = {"as_sql": True, "output_buffer": sql}
    context = MigrationContext.configure(dialect_name="postgresql", opts=options)
    scripts = ScriptDirectory.from_config(migration_config())
    with Operations.context(context):
        for script in reversed(list(scripts.walk_revisions())):
            script.module.upgrade()
    text = sql.getvalue()
    assert "TIMESTAMP WITH TIME ZONE" in text
    assert "digest BYTEA NOT NULL" in text
    assert "CONSTRAINT uq_api_keys_digest UNIQUE (digest)" in text


@pytest.mark.parametrize("table", Base.metadata.sorted_tables, ids=lambda table: table.name)
def test_tables_speak_postgresql(table: object) -> None:
    """Nothing in the tables is SQLite's alone."""
    text = str(CreateTable(table).compile(dialect=postgresql.dialect()))
    assert "DATETIME" not in text
    assert "BLOB" not in text


def test_keys_made_before_grants_keep_all_they_had(connection: Connection) -> None:
    """A key of the first version has no limits, every model, the most urgent class; and is no admin."""
    config = migration_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "0001")
    connection.exec_driver_sql(
        "INSERT INTO api_keys (id, tenant_id, name, digest, shown, created_at)"
        " VALUES ('key_1', 'local', 'k', x'00', 's', '2026-11-01 00:00:00.000000')"
    )
    migrate(connection)
    row = connection.execute(select(KeyRow.id, KeyRow.digest, *GRANT_COLUMNS)).one()
    assert (row.id, row.digest, grant_of(row)) == ("key_1", b"\0", FULL_GRANT)
