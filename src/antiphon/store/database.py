"""One SQL database: its connections, its schema's version, its faults as errors of ours.

Invariants: a transaction is whole or not there, and sees one moment; no wait on the database is longer
than `_PATIENCE_S`; neither statements nor their values stand in an error. What each kind of database
does its own way is in store/sqlite.py and store/postgres.py. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.store import databaseurl
from antiphon.store.databaseurl import SqliteUrl
from antiphon.store.migrate import NewerSchema, is_known, migrate, schema_of
from antiphon.store.patience import Bounds
from antiphon.store.postgres import Postgres
from antiphon.store.sqlite import Sqlite

_PATIENCE_S = 2.0
_NUM_TRIES = 20  # to bring a schema up to date
_NUM_CONNECTIONS = 4


class Kind(Protocol):
    """What one kind of database does its own way."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its driver raises that SQLAlchemy does not wrap."""
        ...

    @property
    def version_query(self) -> str: ...

    @property
    def is_there(self) -> bool:
        """False where it would have to be made."""
        ...

    def make(self) -> None:
        """Make it, where that is ours to do. Raises OSError."""
        ...

    def engine(self) -> AsyncEngine:
        """Connections for work."""
        ...

    def upgrader(self) -> AsyncEngine:
        """Connections for migrations."""
        ...

    def viewer(self) -> AsyncEngine:
        """Connections that change nothing."""
        ...

    def reads(self, engine: AsyncEngine) -> AsyncEngine:
        """The same connections, for transactions that only read …"""
        ...

    def writes(self, engine: AsyncEngine) -> AsyncEngine:
        """… and for the others."""
        ...

    async def hold_others(self, connection: AsyncConnection) -> None:
        """Let no other process migrate until this transaction ends."""
        ...

    def is_passing(self, error: OperationalError) -> bool:
        """Whether a migration that failed so may work a moment later."""
        ...

    def word_of(self, error: BaseException) -> str:
        """What the database said, for the operator."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What a database says of itself. `schema` None: Antiphon was never here."""

    name: str
    version: str
    schema: str | None
    is_newer: bool  # the schema is not one that we know
    rtt_s: float


def check_url(text: str) -> None:
    """Raises BadRequest where it is no database URL of ours."""
    databaseurl.parse(text)


def shown_url(text: str) -> str:
    """The URL without its password. Raises BadRequest."""
    return str(databaseurl.parse(text))


def file_url(file: Path) -> str:
    """The URL of a database in this file."""
    return str(SqliteUrl(file))


async def look(url: str) -> Facts | None:
    """Ask a database about itself and change nothing; None: it is not there yet. Raises as `open`."""
    kind = _kind(url)
    if not kind.is_there:
        return None
    with _faults(kind):
        engine = kind.viewer()
        clock = asyncio.get_running_loop().time
        try:
            async with engine.connect() as connection:
                began_s = clock()
                version = (await connection.execute(text(kind.version_query))).scalar_one()
                rtt_s = clock() - began_s
                schema = await connection.run_sync(schema_of)
                is_newer = schema is not None and not is_known(schema)
                return Facts(kind.name, version, schema, is_newer, rtt_s)
        finally:
            await engine.dispose()


class Database:
    """An open database, its schema up to date."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._engine = kind.engine()
        self._reads = kind.reads(self._engine)
        self._writes = kind.writes(self._engine)

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect; make a file and bring the schema up to date. Raises StoreUnavailable, BadRequest."""
        kind = _kind(url)
        with _faults(kind):
            kind.make()
            # Several processes may make a file at once: SQLite then refuses WAL to one without waiting.
            clock = asyncio.get_running_loop().time
            until_s = clock() + _PATIENCE_S
            for left in reversed(range(_NUM_TRIES)):
                if await _upgrade(kind, is_last_try=left == 0 or clock() >= until_s):
                    break
                await asyncio.sleep(_PATIENCE_S / _NUM_TRIES)
        return cls(kind)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for queries, which all see one moment. Raises StoreUnavailable."""
        with _faults(self._kind):
            async with self._reads.connect() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed where the block ends well. Raises StoreUnavailable, IntegrityError."""
        with _faults(self._kind):
            async with self._writes.begin() as connection:
                yield connection


def _kind(text: str) -> Kind:
    url = databaseurl.parse(text)
    bounds = Bounds(_PATIENCE_S, _NUM_CONNECTIONS)
    return Sqlite(url, bounds) if isinstance(url, SqliteUrl) else Postgres(url, bounds)


async def _upgrade(kind: Kind, *, is_last_try: bool) -> bool:
    """Bring the schema up to date; False: that may work a moment later. Raises BadRequest, DBAPIError."""
    engine = kind.upgrader()
    try:
        async with kind.writes(engine).begin() as connection:
            await kind.hold_others(connection)
            await connection.run_sync(migrate)
    except NewerSchema as error:
        raise BadRequest(f"the database was made by a newer Antiphon: {error}") from error
    except OperationalError as error:
        if is_last_try or not kind.is_passing(error):
            raise
        return False
    finally:
        await engine.dispose()
    return True


@contextlib.contextmanager
def _faults(kind: Kind) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise  # a rule of the schema was broken: whoever wrote knows which
    except DBAPIError as error:
        raise _unavailable(kind.word_of(error.orig or error)) from error
    except PoolTimeout as error:
        raise _unavailable("all its connections are busy") from error
    except kind.errors as error:
        raise _unavailable(kind.word_of(error)) from error
    except TimeoutError as error:
        raise _unavailable("it does not answer in time") from error
    except OSError as error:
        raise _unavailable(error.strerror or str(error)) from error


def _unavailable(detail: str) -> StoreUnavailable:
    return StoreUnavailable("The database of keys does not answer now. Please try again.", detail=detail)
