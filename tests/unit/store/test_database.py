"""A database file: opened by many, locked, broken, newer than we are. What both kinds of database share is
in tests/contract/test_database.py.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.store import database as module
from antiphon.store.database import Database, file_url
from antiphon.store.schema import TenantRow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database goes."""
    return tmp_path / "keys.db"


async def _open(path: Path) -> Database:
    return await Database.open(file_url(path))


@pytest.mark.parametrize("name", ["keys.db", "a b?c=d#e%20.db", "köln"])
async def test_any_path_has_a_url(tmp_path: Path, name: str) -> None:
    """Signs that mean something in a URL are part of the file's name all the same."""
    await (await _open(tmp_path / name)).close()
    assert os.listdir(tmp_path) == [name]


async def test_file_is_made_for_this_user_alone(path: Path) -> None:
    """The file and what SQLite puts beside it are closed to others; they survive and open again."""
    database = await _open(path)
    async with database.reading() as connection:
        assert (await connection.execute(select(TenantRow.id, TenantRow.name))).all() == [("local", "local")]
    modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {0o600}
    await database.close()
    await (await _open(path)).close()


async def test_many_open_a_new_file_at_once(path: Path) -> None:
    """Processes that start together all find the schema, made by one of them."""
    opened = await asyncio.gather(*(_open(path) for _ in range(12)))
    for database in opened:
        async with database.reading() as connection:
            assert len((await connection.execute(select(TenantRow.id))).all()) == 1
        await database.close()


async def test_a_new_file_that_another_holds_is_waited_for(path: Path) -> None:
    """Another process makes the same file just now: SQLite refuses WAL meanwhile, and then does not."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    opening = asyncio.create_task(_open(path))
    await asyncio.sleep(0.2)
    assert not opening.done()
    other.execute("COMMIT")
    other.close()
    await (await opening).close()


async def test_locked_file_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot get the lock in time gets an error, with SQLite's words for the operator alone."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    database = await _open(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable) as caught:
        async with database.writing():
            raise AssertionError("the lock was held")
    assert caught.value.detail == "database is locked"
    assert "locked" not in caught.value.message
    async with database.reading() as connection:  # a writer does not hold up readers
        assert (await connection.execute(select(TenantRow.id))).all()
    holder.close()
    await database.close()


@pytest.fixture
def foreign(path: Path) -> Iterator[Path]:
    """A file that is something else; it must still be that in the end."""
    content = b"this is no database, but a text of some length" * 100
    path.write_bytes(content)
    yield path
    assert path.read_bytes() == content


async def test_file_that_is_no_database(foreign: Path) -> None:
    """A foreign file is refused and left as it is."""
    with pytest.raises(StoreUnavailable) as caught:
        await _open(foreign)
    assert caught.value.detail == "file is not a database"


async def test_folder_that_is_not_there(path: Path) -> None:
    """A wrong path is an error, not a new folder."""
    with pytest.raises(StoreUnavailable) as caught:
        await _open(path / "deeper" / "keys.db")
    assert caught.value.detail == "No such file or directory"


async def test_newer_database_is_left_alone(path: Path) -> None:
    """A downgraded Antiphon does not touch what it does not know."""
    await (await _open(path)).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(BadRequest, match="newer Antiphon: 9999"):
        await _open(path)
