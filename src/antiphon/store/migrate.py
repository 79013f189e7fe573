"""Brings a database's schema to the version this code knows.

The steps are Alembic's, in store/migrations, inside the wheel. Runs in the caller's transaction, so
a start that dies half-way leaves the old schema whole.
"""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


class NewerSchema(Exception):
    """The database holds a version this code does not know."""


def migration_config() -> Config:
    """Alembic's settings; there is no alembic.ini."""
    config = Config()
    config.set_main_option("script_location", "antiphon.store:migrations")
    return config


def schema_of(connection: Connection) -> str | None:
    """The version of the schema that is there; None: there is none."""
    return MigrationContext.configure(connection).get_current_revision()


def is_known(version: str) -> bool:
    """Whether this code knows that version."""
    scripts = ScriptDirectory.from_config(migration_config())
    return version in {script.revision for script in scripts.walk_revisions()}


def migrate(connection: Connection) -> None:
    """Upgrade to the newest version. Raises NewerSchema."""
    current = schema_of(connection)
    if current is not None and not is_known(current):
        raise NewerSchema(current)
    config = migration_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
