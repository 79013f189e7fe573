"""One SQL database: its URL, its connections, its schema's version, its faults as errors of ours.

Invariants: a transaction is whole or not there; those that write on SQLite take its lock when they
begin, so that none fails half-way for want of it; no wait on the database is longer than `_PATIENCE_S`;
neither statements nor their values stand in an error. SQLite is served through aiosqlite's threads:
nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.store.migrate import NewerSchema, migrate

_PATIENCE_S = 2.0
_NUM_TRIES = 20  # to bring a schema up to date
_NUM_CONNECTIONS = 4
_WRITES = "antiphon_writes"


def check_url(text: str) -> None:
    """Raises BadRequest where it is no database URL of ours."""
    _parse(text)


def file_url(file: Path) -> str:
    """The URL of a database in this file."""
    return URL.create("sqlite", database=str(file)).render_as_string()


class Database:
    """An open database, its schema up to date."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    async def open(cls, text: str) -> Self:
        """Connect; make the file and bring the schema up to date. Raises StoreUnavailable, BadRequest."""
        url = _parse(text)
        with _faults():
            _make_file(url)
            # Several processes may make the file at once: SQLite then refuses WAL to one without waiting.
            clock = asyncio.get_running_loop().time
            until_s = clock() + _PATIENCE_S
            for left in reversed(range(_NUM_TRIES)):
                if await cls._upgrade(url, is_last_try=left == 0 or clock() >= until_s):
                    break
                await asyncio.sleep(_PATIENCE_S / _NUM_TRIES)
        return cls(_engine(url, foreign_keys=True))

    @classmethod
    async def _upgrade(cls, url: URL, *, is_last_try: bool) -> bool:
        """Bring the schema up to date; False where the file is locked. Raises BadRequest, DBAPIError."""
        # Migrations rebuild tables, which enforced foreign keys would take for deletes.
        upgrading = _engine(url, foreign_keys=False)
        try:
            async with upgrading.connect() as plain:
                connection = await plain.execution_options(**{_WRITES: True})
                async with connection.begin():
                    await connection.run_sync(migrate)
        except NewerSchema as error:
            raise BadRequest(f"the database was made by a newer Antiphon: {error}") from error
        except OperationalError as error:
            if is_last_try or "locked" not in str(error.orig):
                raise
            return False
        finally:
            await upgrading.dispose()
        return True

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for queries. Raises StoreUnavailable."""
        with _faults():
            async with self._engine.connect() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed where the block ends well. Raises StoreUnavailable, IntegrityError."""
        with _faults():
            async with self._engine.connect() as plain:
                connection = await plain.execution_options(**{_WRITES: True})
                async with connection.begin():
                    yield connection


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError:
        url = None
    if url is None or url.drivername not in ("sqlite", "sqlite+aiosqlite") or url.query:
        raise BadRequest("that is no database URL of ours; write sqlite:///FILE")
    if url.database in (None, "", ":memory:"):
        raise BadRequest("the database URL names no file; write sqlite:///FILE")
    return url.set(drivername="sqlite+aiosqlite")


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise  # a rule of the schema was broken: whoever wrote knows which
    except DBAPIError as error:
        raise _unavailable(str(error.orig)) from error
    except PoolTimeout as error:
        raise _unavailable("all its connections are busy") from error
    except OSError as error:
        raise _unavailable(error.strerror or str(error)) from error


def _unavailable(detail: str) -> StoreUnavailable:
    return StoreUnavailable("The database of keys does not answer now. Please try again.", detail=detail)


def _make_file(url: URL) -> None:
    """For this user alone; what SQLite puts beside it gets the same mode."""
    assert url.database is not None
    file = Path(url.database)
    if not file.exists():
        file.touch(0o600)


def _engine(url: URL, *, foreign_keys: bool) -> AsyncEngine:
    engine = create_async_engine(
        url,
        pool_size=_NUM_CONNECTIONS,
        max_overflow=0,
        pool_timeout=_PATIENCE_S,
        hide_parameters=True,
        # No implicit transactions by the driver: `begin` below says BEGIN, before DDL too.
        connect_args={"timeout": _PATIENCE_S, "isolation_level": None},
    )

    def connect(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")  # readers and a writer do not wait for each other
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine.sync_engine, "connect", connect)
    event.listen(engine.sync_engine, "begin", begin)
    return engine
