"""The Redis store when a real Redis fails: stopped, killed, full, misconfigured, demoted, closed to us."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from antiphon.kv.redisstore import RedisStore, open_store
from antiphon.kv.resp import MAX_VALUE_BYTES
from antiphon.kv.store import FaultKind, Run, StoreFault
from support.redisserver import RedisServer, free_port, redis_server

PATIENCE_S = 20.0
SHORT_S = 0.1
TTL_MS = 600_000
MIB = 2**20
KEYS = [f"antiphon:kv:{number:02}" for number in range(48)]
VALUES = [key.encode() * (MIB // 14) for key in KEYS]


@contextlib.contextmanager
def opened(url: str) -> Iterator[RedisStore]:
    store = open_store(url)
    try:
        yield store
        assert store.num_connections()[1] == 0
    finally:
        store.close()


def fill(store: RedisStore, num_keys: int = 3) -> None:
    for key, value in zip(KEYS[:num_keys], VALUES, strict=False):
        store.put(key, value, TTL_MS, PATIENCE_S)


def kind_of(run: Run) -> FaultKind | None:
    return run.fault.kind if run.fault is not None else None


def put_kind(store: RedisStore, key: str = "other", timeout_s: float = PATIENCE_S) -> FaultKind | None:
    """The fault of a put, if it is one."""
    try:
        store.put(key, bytes(10_000), TTL_MS, timeout_s)
    except StoreFault as fault:
        return fault.kind
    return None


@pytest.mark.parametrize("unix", [False, True])
def test_stopped_in_mid_run(unix: bool) -> None:
    """SIGSTOP: the deadline holds, what came is right, the late reply meets nobody, SIGCONT heals."""
    with redis_server(unix=unix) as server, opened(server.url) as store, server.client() as client:
        fill(store, len(KEYS))
        with ThreadPoolExecutor(1) as pool:
            for _ in range(20):
                said = client.info("stats")["total_net_output_bytes"]
                running = pool.submit(store.get_run, KEYS, 1.0)
                while client.info("stats")["total_net_output_bytes"] < said + 4 * MIB:
                    assert not running.done() or kind_of(running.result()) is None
                server.pause()
                run = running.result()
                server.resume()
                if run.fault is not None:
                    break
        assert kind_of(run) is FaultKind.TIMEOUT
        num_got = run.values.index(None)
        assert run.values == VALUES[:num_got] + [None] * (len(KEYS) - num_got)
        assert store.num_connections() == (0, 0)
        after = store.get_run(KEYS, PATIENCE_S)
        assert (after.values, after.fault) == (VALUES, None)


def test_every_call_to_a_stopped_server_ends() -> None:
    """It accepts connections and answers nothing; all calls keep their deadline and drop their connection."""
    with redis_server() as server, opened(server.url) as store:
        fill(store)
        server.pause()
        calls = (
            lambda: store.put("other", VALUES[0], TTL_MS, SHORT_S),
            lambda: store.touch([(KEYS[0], TTL_MS)], SHORT_S),
            lambda: store.delete(KEYS[:1], SHORT_S),
            lambda: store.ping(SHORT_S),
        )
        for call in calls:
            with pytest.raises(StoreFault) as raised:
                call()
            assert raised.value.kind is FaultKind.TIMEOUT
            assert store.num_connections() == (0, 0)
        assert kind_of(store.get_run(KEYS, SHORT_S)) is FaultKind.TIMEOUT
        server.resume()
        assert store.ping(PATIENCE_S) > 0


def test_killed_and_started_again() -> None:
    """kill -9: unreachable at once; a new server on the same port serves the same store, empty."""
    with redis_server() as server, opened(server.url) as store:
        fill(store)
        server.kill()
        assert kind_of(store.get_run(KEYS, PATIENCE_S)) is FaultKind.UNREACHABLE
        assert put_kind(store) is FaultKind.UNREACHABLE
        server.start()
        run = store.get_run(KEYS, PATIENCE_S)
        assert (run.values, run.fault) == ([None] * len(KEYS), None)
        assert put_kind(store) is None


def test_killed_in_mid_run() -> None:
    """Values that came are right; the rest is a fault, not a wait."""
    with redis_server() as server, opened(server.url) as store, server.client() as client:
        fill(store, len(KEYS))
        said = client.info("stats")["total_net_output_bytes"]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(store.get_run, KEYS * 20, PATIENCE_S)
            while client.info("stats")["total_net_output_bytes"] < said + 4 * MIB:
                assert not running.done()
            server.kill()
            run = running.result()
        server.start()
        assert kind_of(run) is FaultKind.UNREACHABLE
        num_got = run.values.index(None)
        assert run.values[:num_got] == (VALUES * 20)[:num_got]
        assert all(value in (None, right) for value, right in zip(run.values, VALUES * 20, strict=True))


def test_closing_the_store_ends_calls_in_flight() -> None:
    """A run against a stopped server fails when the store is closed, not when its time is up."""
    with redis_server() as server:
        store = open_store(server.url)
        fill(store)
        server.pause()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(store.get_run, KEYS, PATIENCE_S)
            while store.num_connections()[1] == 0:
                assert not running.done()
            store.close()
            assert kind_of(running.result()) is FaultKind.UNREACHABLE
        server.resume()


def test_client_pause() -> None:
    """Paused writes do not keep reads waiting; a pause of all is a timeout. Both end with it."""
    with redis_server() as server, opened(server.url) as store, server.client() as client:
        fill(store)
        client.client_pause(600_000, all=False)
        assert store.get_run(KEYS[:3], PATIENCE_S).values == VALUES[:3]
        assert put_kind(store, timeout_s=SHORT_S) is FaultKind.TIMEOUT
        client.client_unpause()
        client.client_pause(1000, all=True)  # this one pauses CLIENT UNPAUSE too
        assert kind_of(store.get_run(KEYS[:3], SHORT_S)) is FaultKind.TIMEOUT
        assert store.get_run(KEYS[:3], PATIENCE_S).values == VALUES[:3]
        assert put_kind(store) is None


def test_a_full_server_refuses_writes_and_reads_on() -> None:
    """noeviction: -OOM for puts; get, touch and delete work, and deleting makes room."""
    config = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    with redis_server(*config) as server, opened(server.url) as store:
        stored = []
        with pytest.raises(StoreFault) as raised:
            for key, value in zip(KEYS, VALUES, strict=True):
                assert store.put(key, value, TTL_MS, PATIENCE_S)
                stored.append(key)
        assert raised.value.kind is FaultKind.OUT_OF_MEMORY
        assert store.get_run(stored, PATIENCE_S).values == VALUES[: len(stored)]
        store.touch([(key, TTL_MS) for key in stored], PATIENCE_S)
        assert store.delete(stored, PATIENCE_S) == len(stored)
        assert put_kind(store) is None


def test_a_server_that_cannot_save_refuses_writes_and_reads_on() -> None:
    """-MISCONF, when snapshots are configured and fail."""
    with redis_server("--save", "3600 1", "--dbfilename", "dump.rdb") as server, opened(server.url) as store:
        fill(store)
        (server.folder / "dump.rdb").mkdir()
        with server.client() as client:
            client.bgsave()
            server.await_log("Background saving error")
        assert put_kind(store) is FaultKind.MISCONFIGURED
        assert store.get_run(KEYS[:3], PATIENCE_S).values == VALUES[:3]


def test_a_demoted_server_refuses_writes_and_reads_on() -> None:
    """-READONLY: its connection is not kept; once it is a master again, puts work."""
    with redis_server() as server, opened(server.url) as store, server.client() as client:
        fill(store)
        client.replicaof("127.0.0.1", free_port())
        assert put_kind(store) is FaultKind.READ_ONLY
        assert store.num_connections() == (0, 0)
        assert store.get_run(KEYS[:3], PATIENCE_S).values == VALUES[:3]
        client.replicaof("NO", "ONE")
        assert put_kind(store) is None


ACL = ("--user", "kv", "on", ">right", "~antiphon:kv:*", "-@all")
NEEDED = ("+get", "+set", "+pexpire", "+unlink", "+ping", "+select")


def with_login(server: RedisServer, login: str) -> str:
    return server.url.replace("://", f"://{login}@")


def test_few_rights_are_enough() -> None:
    """A login that may GET, SET, PEXPIRE, UNLINK and PING its own keys can do all that a store does."""
    with redis_server(*ACL, *NEEDED) as server, opened(with_login(server, "kv:right")) as store:
        fill(store)
        store.touch([(KEYS[0], TTL_MS)], PATIENCE_S)
        assert store.get_run(KEYS[:4], PATIENCE_S).values == [*VALUES[:3], None]
        assert store.delete(KEYS[:3], PATIENCE_S) == 3
        assert store.ping(PATIENCE_S) > 0


@pytest.mark.parametrize("missing", ["+get", "+set", "+pexpire", "+unlink", "+ping"])
def test_a_missing_right_is_denied(missing: str) -> None:
    """-NOPERM for that command alone; keys of others are denied too."""
    rights = [right for right in NEEDED if right != missing]
    with redis_server(*ACL, *rights) as server, opened(with_login(server, "kv:right")) as store:
        kinds: dict[str, FaultKind | None] = {"+set": put_kind(store, KEYS[0])}
        kinds["+get"] = kind_of(store.get_run(KEYS[:3], PATIENCE_S))
        calls = {
            "+pexpire": lambda: store.touch([(KEYS[0], TTL_MS)], PATIENCE_S),
            "+unlink": lambda: store.delete(KEYS[:1], PATIENCE_S),
            "+ping": lambda: store.ping(PATIENCE_S),
        }
        for name, call in calls.items():
            kinds[name] = None
            try:
                call()
            except StoreFault as fault:
                kinds[name] = fault.kind
        assert kinds == {name: FaultKind.DENIED if name == missing else None for name in kinds}
        assert put_kind(store, "others:key") is FaultKind.DENIED


def test_no_password_and_a_wrong_one_are_denied() -> None:
    """-NOAUTH, -WRONGPASS; the right one passes."""
    with redis_server("--requirepass", "right") as server:
        for url, kind in (
            (server.url, FaultKind.DENIED),
            (with_login(server, ":wrong"), FaultKind.DENIED),
            (with_login(server, "nobody:right"), FaultKind.DENIED),
            (with_login(server, ":right"), None),
        ):
            with opened(url) as store:
                assert kind_of(store.get_run(KEYS[:2], PATIENCE_S)) is kind
                assert put_kind(store) is kind


def test_a_server_with_too_many_clients() -> None:
    """-ERR max number of clients: FULL, and served once somebody leaves."""
    with redis_server("--maxclients", "2") as server, opened(server.url) as store:
        with server.client() as one, server.client() as two:
            one.ping()
            two.ping()
            assert kind_of(store.get_run(KEYS[:2], PATIENCE_S)) is FaultKind.FULL
            assert put_kind(store) is FaultKind.FULL
        while put_kind(store) is FaultKind.FULL:
            pass
        assert put_kind(store) is None


def test_a_value_too_long_to_read_is_not_written() -> None:
    """What no reader would take is refused before it is sent."""
    with redis_server() as server, opened(server.url) as store:
        with pytest.raises(StoreFault, match="too long"):
            store.put(KEYS[0], bytes(MAX_VALUE_BYTES + 1), TTL_MS, PATIENCE_S)
        assert store.put(KEYS[0], bytes(MAX_VALUE_BYTES), TTL_MS, PATIENCE_S)
        assert store.get_run(KEYS[:1], PATIENCE_S).num_bytes == MAX_VALUE_BYTES
