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


def migrate(connection: Connection) -> None:
    """Upgrade to the newest version. Raises NewerSchema."""
    config = migration_config()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in known:
        raise NewerSchema(current)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
