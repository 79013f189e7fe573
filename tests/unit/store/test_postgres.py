"""PostgreSQL's own faults, on a real server: killed, restarted, hung, locked, wrong password, TLS."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import select, text, update

from antiphon.core.errors import StoreUnavailable
from antiphon.store import database as module
from antiphon.store.database import Database, look
from antiphon.store.keys import KeyStore
from antiphon.store.postgres import MIGRATIONS_LOCK
from antiphon.store.schema import KeyRow, TenantRow
from support.postgres import PASSWORD, USER, PostgresServer, postgres_server
from support.redisserver import make_certificates


@asynccontextmanager
async def _open(url: str) -> AsyncIterator[Database]:
    database = await Database.open(url)
    try:
        yield database
    finally:
        await database.close()


@contextmanager
def _down(server: PostgresServer) -> Iterator[None]:
    """The server is crashed inside, and back outside."""
    server.crash()
    try:
        yield
    finally:
        server.start()


async def test_restarted_server_is_found_again(postgres: PostgresServer) -> None:
    """While it is down requests are told; when it is back the next one works, on new connections."""
    async with _open(postgres.url(postgres.new_database())) as database:
        keys = KeyStore(database)
        made = [await keys.create("acme", f"k{n}") for n in range(3)]
        await asyncio.gather(*(keys.list() for _ in range(8)))  # all connections are open

        with _down(postgres):
            with pytest.raises(StoreUnavailable):
                await keys.has_any()
            with pytest.raises(StoreUnavailable) as caught:
                await keys.create("acme", "k")
            assert "Connect call failed" in caught.value.detail
        assert await keys.list() == [key for key, _ in made]  # each acknowledged key outlived the crash
        await keys.create("acme", "k")


async def test_restart_between_requests_is_not_noticed(postgres: PostgresServer) -> None:
    """Nobody asks while the server restarts: nobody is told of it."""
    async with _open(postgres.url(postgres.new_database())) as database:
        keys = KeyStore(database)
        await asyncio.gather(*(keys.create("acme", f"k{n}") for n in range(8)))
        await asyncio.to_thread(postgres.stop)
        await asyncio.to_thread(postgres.start)
        assert len(await keys.list()) == 8
        await keys.create("acme", "k")


async def test_server_that_dies_in_a_transaction_undoes_it(postgres: PostgresServer) -> None:
    """The writer is told, and nothing of what it wrote is there."""
    async with _open(postgres.url(postgres.new_database())) as database:
        key, _ = await KeyStore(database).create("acme", "k")
        with pytest.raises(StoreUnavailable):
            async with database.writing() as connection:
                await connection.execute(update(KeyRow).values(name="changed"))
                with _down(postgres):
                    pass
                await connection.execute(select(KeyRow.id))
        assert await KeyStore(database).find(key.id) == key


async def test_hung_server_is_given_up(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and says nothing costs a bounded wait; later it is asked again."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)
    async with _open(postgres.url(postgres.new_database())) as database:
        keys = KeyStore(database)
        await keys.create("acme", "k")
        with _hung(postgres):
            for _ in range(2):
                with pytest.raises(StoreUnavailable) as caught:
                    await keys.list()
                assert caught.value.detail == "it does not answer in time"
        assert len(await keys.list()) == 1


@contextmanager
def _hung(server: PostgresServer) -> Iterator[None]:
    main = psutil.Process(server.pid)
    processes = [main, *main.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextmanager
def _holding(server: PostgresServer, database: str, statement: str) -> Iterator[None]:
    """Somebody else is in a transaction in which this statement was done."""
    psql = subprocess.Popen(
        server.psql(database),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=server.environ,
    )
    assert psql.stdin is not None
    assert psql.stdout is not None
    psql.stdin.write(f"BEGIN; {statement}; SELECT 'held';\n")
    psql.stdin.flush()
    while "held" not in (line := psql.stdout.readline()):
        assert line, "psql ended"
    yield
    psql.communicate("ROLLBACK;\n", timeout=30)


async def test_locked_row_is_said(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who must wait for a row too long is told why; who only reads, or notes a use, does not wait."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)
    name = postgres.new_database()
    async with _open(postgres.url(name)) as database:
        keys = KeyStore(database)
        key, _ = await keys.create("acme", "k")
        with _holding(postgres, name, "UPDATE api_keys SET name = 'theirs'"):
            with pytest.raises(StoreUnavailable) as caught:
                await keys.revoke(key.id)
            assert caught.value.detail == "canceling statement due to lock timeout"
            assert await keys.list() == [key]
            await keys.mark_used([key.id], key.created_at)
        assert (await keys.revoke(key.id)).revoked_at is not None


async def test_slow_statement_is_ended(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends it itself: nothing goes on there for somebody who has gone."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.3)
    async with _open(postgres.url(postgres.new_database())) as database:
        with pytest.raises(StoreUnavailable) as caught:
            async with database.reading() as connection:
                await connection.execute(text("SELECT pg_sleep(60)"))
        assert caught.value.detail == "canceling statement due to statement timeout"


async def test_cancelled_wait_frees_its_connection(postgres: PostgresServer) -> None:
    """Requests cancelled while they wait for a row leave every connection usable."""
    name = postgres.new_database()
    async with _open(postgres.url(name)) as database:
        keys = KeyStore(database)
        key, _ = await keys.create("acme", "k")
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with _holding(postgres, name, "UPDATE api_keys SET name = 'theirs'"):
            tasks = [asyncio.create_task(keys.revoke(key.id)) for _ in range(module._NUM_CONNECTIONS)]
            await asyncio.to_thread(postgres.await_sql, waits, str(len(tasks)), database=name)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended)
            assert len(await asyncio.gather(*(keys.list() for _ in range(8)))) == 8
        assert (await keys.find(key.id)).revoked_at is None


async def test_writes_of_a_reader_are_refused(postgres: PostgresServer) -> None:
    """A reader cannot write by mistake, and the connection may write again afterwards."""
    async with _open(postgres.url(postgres.new_database())) as database:
        with pytest.raises(StoreUnavailable) as caught:
            async with database.reading() as connection:
                await connection.execute(update(TenantRow).values(name="x"))
        assert "read-only" in caught.value.detail
        for n in range(8):
            await KeyStore(database).create("acme", f"k{n}")


async def test_values_are_in_no_error(postgres: PostgresServer) -> None:
    """What does not fit its column is a fault of ours, and is not repeated."""
    async with _open(postgres.url(postgres.new_database())) as database:
        for value in ("hush" * 100, "hush\0"):
            with pytest.raises(StoreUnavailable) as caught:
                async with database.writing() as connection:
                    await connection.execute(update(TenantRow).values(name=value))
            assert "hush" not in caught.value.detail
            assert caught.value.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("p%40ss", "wrong"), "password authentication failed"),
        (("/test", "/nowhere"), "does not exist"),
    ],
)
async def test_wrong_urls_are_told(postgres: PostgresServer, change: tuple[str, str], words: str) -> None:
    """The server's own word, and no password."""
    url = postgres.url(postgres.new_database()).replace(*change)
    with pytest.raises(StoreUnavailable) as caught:
        await Database.open(url)
    assert words in caught.value.detail
    assert "wrong" not in caught.value.detail


async def test_password_from_a_file(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PGPASSFILE keeps the password out of URLs and command lines, over the unix socket too."""
    file = tmp_path / "pgpass"
    file.touch(0o600)
    file.write_text(f"*:*:*:{USER}:{PASSWORD}\n")
    monkeypatch.setenv("PGPASSFILE", str(file))
    name = postgres.new_database()
    network = f"postgresql://{USER}@127.0.0.1:{postgres.port}/{name}"
    socket = f"postgresql://{USER}@/{name}?host={postgres.folder}&port={postgres.port}"
    for url in (network, socket):
        async with _open(url) as database:
            await KeyStore(database).create("acme", "k")
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    with pytest.raises(StoreUnavailable):
        await Database.open(network)


async def test_migration_is_waited_for(postgres: PostgresServer) -> None:
    """While another process migrates, opening waits, and goes on when it is done."""
    name = postgres.new_database()
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with _holding(postgres, name, f"SELECT pg_advisory_xact_lock({MIGRATIONS_LOCK})"):
        opening = asyncio.create_task(Database.open(postgres.url(name)))
        await asyncio.to_thread(postgres.await_sql, waits, "1", database=name)
        assert not opening.done()
    await (await opening).close()


async def test_tls_is_spoken_with_who_proves_to_be_it(tmp_path: Path) -> None:
    """With the right authority it works; without it, without TLS, and under another name it does not."""
    made = make_certificates(tmp_path)
    with postgres_server(tls=made) as server:
        name = server.new_database()
        good = f"?sslmode=verify-full&sslrootcert={made.ca}"
        async with _open(server.url(name, host="localhost", query=good)) as database:
            await KeyStore(database).create("acme", "k")
            async with database.reading() as connection:
                query = text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
                assert (await connection.execute(query)).scalar_one() is True
        for url, words in (
            (server.url(name, host="localhost", query="?sslmode=verify-full"), "CERTIFICATE_VERIFY_FAILED"),
            (server.url(name), "no pg_hba.conf entry"),
            (server.url(name, host="127.0.0.2", query=good), "CERTIFICATE_VERIFY_FAILED"),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                await look(url)
            assert words in caught.value.detail
