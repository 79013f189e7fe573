"""PostgreSQL as a `Kind` of database, through asyncpg.

Invariants: the server itself ends statements and waits for locks that take too long, and transactions
whose client is gone; a server that says nothing at all is given up a little later. Connections
that the server has closed are not used: after its restart the next transaction finds a new one. Of what
it says about a fault, nothing that could hold a value is repeated. One process migrates at a time; the
others wait for it.
"""

from __future__ import annotations

import asyncpg
from sqlalchemy import event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import InvalidatePoolError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from antiphon.store.databaseurl import PostgresUrl
from antiphon.store.patience import Bounds

_LOCK_SHARE, _CLIENT_SHARE = 0.75, 1.25  # of the patience: locks first, then statements, then the client
_IDLE_TRANSACTION_S = 10.0
_UPGRADE_S = 60.0  # one's own migration, or that of another process
MIGRATIONS_LOCK = 0x616E7469_70686F6E  # "antiphon"
_OF_VALUES = ("22", "23")  # SQLSTATE classes whose messages may repeat values


class Postgres:
    """A server's database, as `Database` wants it."""

    name = "PostgreSQL"
    errors: tuple[type[Exception], ...] = (asyncpg.PostgresError, asyncpg.InterfaceError)
    version_query = "SELECT current_setting('server_version')"
    is_there = True

    def __init__(self, url: PostgresUrl, bounds: Bounds) -> None:
        self._url = url
        self._bounds = bounds
        self._tls = url.tls.context() if url.tls is not None else False

    def make(self) -> None:
        """Databases are made by who runs the server."""

    def engine(self) -> AsyncEngine:
        """Connections for work."""
        return self._engine(self._bounds.patience_s)

    def upgrader(self) -> AsyncEngine:
        """Connections for migrations, which take longer than a request may."""
        return self._engine(_UPGRADE_S)

    def viewer(self) -> AsyncEngine:
        """The same as for work."""
        return self.engine()

    def reads(self, engine: AsyncEngine) -> AsyncEngine:
        """Transactions that see one moment, as they do on SQLite."""
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def writes(self, engine: AsyncEngine) -> AsyncEngine:
        """The same: each statement sees what others have committed."""
        return engine

    async def hold_others(self, connection: AsyncConnection) -> None:
        """Wait until no other process migrates, and make them wait until this transaction ends."""
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATIONS_LOCK})
        # From here on a wait holds up all who use the tables.
        await connection.execute(text(f"SET LOCAL lock_timeout = {_milliseconds(self._bounds.patience_s)}"))

    def is_passing(self, error: OperationalError) -> bool:
        """Nothing is: whoever migrates is waited for by `hold_others`."""
        return False

    def word_of(self, error: BaseException) -> str:
        """What the server, or asyncpg, said, without values."""
        said = error.__cause__ or error  # SQLAlchemy's errors are raised from asyncpg's
        if str(getattr(said, "sqlstate", "")).startswith(_OF_VALUES) or isinstance(said, ValueError):
            return type(said).__name__
        return str(said.args[0]) if said.args else type(said).__name__

    def _engine(self, statement_s: float) -> AsyncEngine:
        bounds = self._bounds
        settings = {
            "application_name": "antiphon",
            "timezone": "UTC",
            "lock_timeout": _milliseconds(_LOCK_SHARE * statement_s),
            "statement_timeout": _milliseconds(statement_s),
            "idle_in_transaction_session_timeout": _milliseconds(_IDLE_TRANSACTION_S),
        }
        engine = create_async_engine(
            self._url.url,
            pool_size=bounds.num_connections,
            max_overflow=0,
            pool_timeout=bounds.patience_s,
            pool_use_lifo=True,  # few requests keep few connections in use
            hide_parameters=True,
            connect_args={
                "timeout": bounds.patience_s,
                "command_timeout": _CLIENT_SHARE * statement_s,
                "ssl": self._tls,
                "server_settings": settings,
            },
        )
        event.listen(engine.sync_engine, "checkout", _require_open)
        return engine


def _require_open(
    connection: DBAPIConnection, entry: ConnectionPoolEntry, fairy: PoolProxiedConnection
) -> None:
    """Called for a connection from the pool: raises where its server has closed it, and a new one is made."""
    driver = entry.driver_connection
    if driver is None or driver.is_closed():
        raise InvalidatePoolError


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
