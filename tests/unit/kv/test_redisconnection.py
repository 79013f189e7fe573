"""Connections and pools: nothing that owes a reply, or said something unasked, is used again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.kv import redisurl
from antiphon.kv.deadline import Deadline
from antiphon.kv.redisconnection import Pool
from antiphon.kv.redisurl import Login
from antiphon.kv.resp import ErrorReply, Status
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Dialer
from support.redisserver import RedisServer, redis_server
from support.scriptedredis import HANG, ScriptedRedis, scripted_redis

PATIENCE_S = 20.0


def deadline() -> Deadline:
    return Deadline(PATIENCE_S)


def pool_of(server: ScriptedRedis | RedisServer, login: Login | None = None) -> Pool:
    return Pool(Dialer(None), redisurl.parse(server.url).addresses[0], login or Login())


@pytest.fixture
def echo() -> Iterator[ScriptedRedis]:
    """Says OK to everything; to HUSH nothing, to TWICE it twice."""
    special = {b"HUSH": HANG, b"TWICE": b"+OK\r\n+OK\r\n"}
    with scripted_redis(lambda command: special.get(command[0], b"+OK\r\n")) as server:
        yield server


def test_a_connection_serves_again(echo: ScriptedRedis) -> None:
    """Taken, given back, taken: one connection."""
    pool = pool_of(echo)
    for _ in range(5):
        with pool.lease(deadline()) as connection:
            assert connection.call(b"HELLO", deadline=deadline()) == Status("OK")
    assert (echo.num_connections, pool.count()) == (1, (1, 0))
    pool.close()


def test_replies_come_in_the_order_of_commands(echo: ScriptedRedis) -> None:
    """Commands sent ahead are answered one by one, and count as owed until then."""
    pool = pool_of(echo)
    with pool.lease(deadline()) as connection:
        for _ in range(3):
            connection.send((b"HELLO",), deadline())
        assert connection.num_owed == 3
        for _ in range(3):
            connection.receive(deadline())
    assert pool.count() == (1, 0)
    pool.close()


def test_who_owes_a_reply_is_closed(echo: ScriptedRedis) -> None:
    """Given back before its reply was read, as after a cancel: never used again."""
    pool = pool_of(echo)
    with pool.lease(deadline()) as connection:
        connection.send((b"HELLO",), deadline())
    assert not connection.is_open
    assert pool.count() == (0, 0)
    pool.close()


def test_after_a_timeout_it_is_closed(echo: ScriptedRedis) -> None:
    """No late reply can reach anybody."""
    pool = pool_of(echo)
    with pytest.raises(StoreFault), pool.lease(deadline()) as connection:
        connection.call(b"HUSH", deadline=Deadline(0.05))
    assert not connection.is_open
    assert pool.count() == (0, 0)
    pool.close()


def test_an_unasked_reply_is_never_taken_for_an_answer(echo: ScriptedRedis) -> None:
    """A server that says more than it was asked loses its connection."""
    pool = pool_of(echo)
    with pool.lease(deadline()) as first:
        first.call(b"TWICE", deadline=deadline())
    with pool.lease(deadline()) as second:
        assert second.call(b"HELLO", deadline=deadline()) == Status("OK")
    assert second is not first and not first.is_open
    pool.close()


def test_a_dead_idle_connection_is_replaced() -> None:
    """A server that was restarted costs no call a fault."""
    with redis_server() as server:
        pool = pool_of(server)
        with pool.lease(deadline()) as first:
            assert first.call(b"PING", deadline=deadline()) == Status("PONG")
        server.kill()
        server.start()
        with pool.lease(deadline()) as second:
            assert second.call(b"PING", deadline=deadline()) == Status("PONG")
        assert pool.count() == (1, 0)
        pool.close()


@pytest.mark.parametrize("reply", [b"-READONLY replica\r\n", b"-ERR max number of clients reached\r\n"])
def test_some_errors_end_the_connection(reply: bytes) -> None:
    """Behind a name that leads elsewhere now, a new one may find the master; its last replies are read."""
    with scripted_redis(lambda _: reply) as server:
        pool = pool_of(server)
        with pool.lease(deadline()) as connection:
            for _ in range(3):
                connection.send((b"SET",), deadline())
            assert {type(connection.receive(deadline())) for _ in range(3)} == {ErrorReply}
        assert not connection.is_open
        assert pool.count() == (0, 0)
        pool.close()


def test_login_comes_first(echo: ScriptedRedis) -> None:
    """AUTH with user and password, then SELECT; once a connection."""
    pool = pool_of(echo, Login("kv", "secret", 3))
    for _ in range(2):
        with pool.lease(deadline()) as connection:
            connection.call(b"PING", deadline=deadline())
    assert echo.commands == [(b"AUTH", b"kv", b"secret"), (b"SELECT", b"3"), (b"PING",), (b"PING",)]
    pool.close()


@pytest.mark.parametrize(
    ("login", "kind"),
    [
        (Login("kv", "wrong"), FaultKind.DENIED),
        (Login(None, "wrong"), FaultKind.DENIED),
        (Login("kv", "right", 99), FaultKind.OTHER),
        (Login("kv", "right", 1), None),
    ],
)
def test_a_refused_login_is_denied(login: Login, kind: FaultKind | None) -> None:
    """By a real server's ACL; and a database that is not there is refused."""
    with redis_server("--user", "kv", "on", ">right", "~*", "+@all", "--databases", "2") as server:
        pool = pool_of(server, login)
        if kind is None:
            pool.give_back(pool.take(deadline()))
            assert pool.count() == (1, 0)
        else:
            with pytest.raises(StoreFault) as raised:
                pool.take(deadline())
            assert raised.value.kind is kind
            assert pool.count() == (0, 0)
        pool.close()


def test_closing_reaches_connections_that_are_out(echo: ScriptedRedis) -> None:
    """A call in flight fails, and what it gives back is not kept."""
    pool = pool_of(echo)
    connection = pool.take(deadline())
    connection.send((b"HUSH",), deadline())
    pool.close()
    with pytest.raises(StoreFault) as raised:
        connection.receive(deadline())
    assert raised.value.kind is FaultKind.UNREACHABLE
    pool.give_back(connection)
    assert pool.count() == (0, 0)
    with pytest.raises(StoreFault):
        pool.take(deadline())


def test_a_retired_pool_lets_calls_end(echo: ScriptedRedis) -> None:
    """What is out works on, and is closed when it comes back."""
    pool = pool_of(echo)
    with pool.lease(deadline()) as connection:
        pool.retire()
        assert connection.call(b"HELLO", deadline=deadline()) == Status("OK")
    assert not connection.is_open
    assert pool.count() == (0, 0)
