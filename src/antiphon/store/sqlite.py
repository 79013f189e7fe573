"""SQLite as a `Kind` of database: one file, through aiosqlite's threads.

Invariants: transactions that write take the file's lock when they begin, so that none fails half-way for
want of it; the file and what SQLite puts beside it are this user's alone.
"""

from __future__ import annotations

from sqlalchemy import URL, Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from antiphon.store.databaseurl import SqliteUrl
from antiphon.store.patience import Bounds

_WRITES = "antiphon_writes"


class Sqlite:
    """A file, as `Database` wants it."""

    name = "SQLite"
    errors: tuple[type[Exception], ...] = ()
    version_query = "SELECT sqlite_version()"

    def __init__(self, url: SqliteUrl, bounds: Bounds) -> None:
        self._file = url.file
        self._bounds = bounds

    @property
    def is_there(self) -> bool:
        """Whether the file is."""
        return self._file.exists()

    def make(self) -> None:
        """Make the file, for this user alone; what SQLite puts beside it gets the same mode."""
        if not self._file.exists():
            self._file.touch(0o600)

    def engine(self) -> AsyncEngine:
        """Connections for work."""
        return self._engine("journal_mode = WAL", "foreign_keys = ON")  # readers do not wait for writers

    def upgrader(self) -> AsyncEngine:
        """Connections for migrations: they rebuild tables, which enforced foreign keys take for deletes."""
        return self._engine("journal_mode = WAL", "foreign_keys = OFF")

    def viewer(self) -> AsyncEngine:
        """Connections that change nothing: the journal's mode stands in the file."""
        return self._engine()

    def reads(self, engine: AsyncEngine) -> AsyncEngine:
        """The same: in WAL mode a transaction sees one moment."""
        return engine

    def writes(self, engine: AsyncEngine) -> AsyncEngine:
        """Its transactions begin with the lock."""
        return engine.execution_options(**{_WRITES: True})

    async def hold_others(self, connection: AsyncConnection) -> None:
        """Nobody else writes while this transaction lasts: it began with the lock."""

    def is_passing(self, error: OperationalError) -> bool:
        """Whether another process, that makes the file just now, may be the reason."""
        return "locked" in str(error.orig)

    def word_of(self, error: BaseException) -> str:
        """What SQLite said; it never repeats values."""
        return str(error)

    def _engine(self, *pragmas: str) -> AsyncEngine:
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(self._file)),
            pool_size=self._bounds.num_connections,
            max_overflow=0,
            pool_timeout=self._bounds.patience_s,
            hide_parameters=True,
            # No implicit transactions by the driver: `begin` below says BEGIN, before DDL too.
            connect_args={"timeout": self._bounds.patience_s, "isolation_level": None},
        )

        def connect(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
            cursor = connection.cursor()
            for pragma in pragmas:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        def begin(connection: Connection) -> None:
            writes = connection.get_execution_options().get(_WRITES)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        event.listen(engine.sync_engine, "connect", connect)
        event.listen(engine.sync_engine, "begin", begin)
        return engine
