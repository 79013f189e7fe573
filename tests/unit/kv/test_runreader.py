"""Reading a run: order, look-ahead, and every way a server can go wrong in the middle of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from antiphon.kv.redisstore import RedisStore, open_store
from antiphon.kv.runreader import AHEAD
from antiphon.kv.store import FaultKind, Run
from support.redisserver import RedisServer, redis_server
from support.scriptedredis import HANG, Command, scripted_redis

PATIENCE_S = 20.0
SHORT_S = 0.2
TTL_MS = 60_000
KEYS = [f"antiphon:kv:{number:03}" for number in range(12)]


def value_of(key: str | bytes) -> bytes:
    """What a key holds in these tests: it names its key."""
    name = key if isinstance(key, bytes) else key.encode()
    return name * 50


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


class Trouble:
    """Answers GETs rightly, but for one key: with these bytes (None: hangs up), as often as told."""

    def __init__(self, at: int, reply: bytes | None, times: int = 10**9) -> None:
        self.key = KEYS[at].encode()
        self.reply = reply
        self.times = times

    def __call__(self, command: Command) -> bytes | None:
        if command[1] == self.key and self.times > 0:
            self.times -= 1
            return self.reply
        return bulk(value_of(command[1]))


def run_against(answer: Callable[[Command], bytes | None], timeout_s: float = PATIENCE_S) -> Run:
    with scripted_redis(answer) as server:
        store = open_store(server.url)
        run = store.get_run(KEYS, timeout_s)
        assert store.num_connections()[1] == 0
        store.close()
    return run


def check(run: Run, at: int, kind: FaultKind | None) -> None:
    """All values before `at`, none there, right ones or none behind it, and this fault."""
    assert (run.fault.kind if run.fault else None) == kind
    assert run.values[:at] == [value_of(key) for key in KEYS[:at]]
    assert run.values[at] is None
    for key, value in zip(KEYS, run.values, strict=True):
        assert value in (None, value_of(key))


@pytest.mark.parametrize("at", [0, 1, 5, 11])
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"$-1\r\n", None),
        (b"-LOADING Redis is loading the dataset in memory\r\n", FaultKind.LOADING),
        (b"-NOPERM this user has no permissions\r\n", FaultKind.DENIED),
        (b"-WRONGTYPE not a string\r\n", FaultKind.OTHER),
        (b"-CLUSTERDOWN Hash slot not served\r\n", FaultKind.MOVED),
        (b"-TRYAGAIN later\r\n", FaultKind.MOVED),
        (b"-MOVED 1 127.0.0.1:1\r\n", FaultKind.MOVED),
        (None, FaultKind.UNREACHABLE),
        (b"$600\r\nhalf", FaultKind.MALFORMED),
        (b"$99999999999\r\n", FaultKind.MALFORMED),
        (b"$-7\r\n", FaultKind.MALFORMED),
        (b":5\r\n", FaultKind.MALFORMED),
        (b"*1\r\n$1\r\na\r\n", FaultKind.MALFORMED),
        (b"+OK\r\n", FaultKind.MALFORMED),
        (b"?\r\n", FaultKind.MALFORMED),
        (b"$3\r\nabcdef\r\n", FaultKind.MALFORMED),
    ],
)
def test_trouble_in_mid_run(at: int, reply: bytes | None, kind: FaultKind | None) -> None:
    """What came before it is kept, what comes behind is right or not given, the fault is named."""
    if reply is not None and reply.endswith(b"half"):
        reply += b"x" * 596 + b"--"
    check(run_against(Trouble(at, reply)), at, kind)


@pytest.mark.parametrize("reply", [HANG, b"$600\r\nhalf" + HANG, b"$60" + HANG, b"-LOADING" + HANG])
def test_silence_in_mid_run(reply: bytes) -> None:
    """The deadline ends it, wherever in a reply the server fell silent."""
    check(run_against(Trouble(5, reply), SHORT_S), 5, FaultKind.TIMEOUT)


def test_half_a_reply_and_the_end() -> None:
    """A server that dies in the middle of a value."""
    with scripted_redis(lambda _: b"$600\r\nhalf" + HANG) as server, ThreadPoolExecutor(1) as pool:
        store = open_store(server.url)
        run = pool.submit(store.get_run, KEYS, PATIENCE_S)
        while not server.commands:
            assert not run.done()
        server.hang_up()
        check(run.result(), 0, FaultKind.UNREACHABLE)
        store.close()


@pytest.mark.parametrize("reply", [HANG, b"$600\r\nhalf" + HANG, b"$99999999999\r\n", b"?\r\n", None])
def test_a_fault_costs_its_connection_and_no_more(reply: bytes | None) -> None:
    """The next run of the same store, on other connections, is whole."""
    with scripted_redis(Trouble(3, reply, times=1)) as server:
        store = open_store(server.url)
        check(store.get_run(KEYS, SHORT_S), 3, _kind(reply))
        assert store.get_run(KEYS, PATIENCE_S).values == [value_of(key) for key in KEYS]
        store.close()


def _kind(reply: bytes | None) -> FaultKind:
    if reply is None:
        return FaultKind.UNREACHABLE
    return FaultKind.TIMEOUT if reply.endswith(HANG) else FaultKind.MALFORMED


def test_error_replies_keep_the_connection() -> None:
    """A refusal is a whole reply: its connection is still in step and serves on."""
    with scripted_redis(Trouble(3, b"-LOADING wait\r\n", times=1)) as server:
        store = open_store(server.url)
        check(store.get_run(KEYS, PATIENCE_S), 3, FaultKind.LOADING)
        assert store.get_run(KEYS, PATIENCE_S).values == [value_of(key) for key in KEYS]
        assert server.num_connections == 2
        store.close()


def test_nothing_is_asked_far_behind_a_hole() -> None:
    """At most what two connections had under way when the hole was seen."""
    with scripted_redis(Trouble(2, b"$-1\r\n")) as server:
        store = open_store(server.url, num_sockets=2)
        for _ in range(2):
            store.get_run(KEYS, PATIENCE_S)
            asked = max(KEYS.index(command[1].decode()) for command in server.commands)
            assert asked <= 2 + 2 * AHEAD
        store.close()


def test_the_prefix_does_not_wait_for_a_cold_second_socket() -> None:
    """The first run of a store opens its second connection only when it gets there."""
    with scripted_redis(Trouble(0, b"$-1\r\n")) as server:
        store = open_store(server.url, num_sockets=2)
        check(store.get_run(KEYS, PATIENCE_S), 0, None)
        assert server.num_connections == 1
        store.close()


@pytest.fixture(scope="module")
def filled() -> Iterator[RedisServer]:
    """A real server that holds every key, values of 300 kB."""
    with redis_server() as server:
        with server.client() as client:
            for key in KEYS:
                client.set(key, value_of(key) * 400)
        yield server


def test_short_timeouts_at_random_points_mix_nothing_up(filled: RedisServer) -> None:
    """500 runs that are cut off anywhere: every value is its key's, and no connection is left behind."""
    store = open_store(filled.url, num_sockets=2, max_calls=8)
    expected = [value_of(key) * 400 for key in KEYS]

    def work(seed: int) -> int:
        dice = random.Random(seed)
        num_cut = 0
        for _ in range(50):
            first = dice.randrange(len(KEYS))
            run = store.get_run(KEYS[first:], dice.choice([0.0003, 0.001, 0.003, 0.01]))
            num_cut += run.fault is not None
            assert run.fault is None or run.fault.kind is FaultKind.TIMEOUT
            for value, right in zip(run.values, expected[first:], strict=True):
                assert value is None or value == right
        return num_cut

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(work, range(10))) > 50
    idle, out = store.num_connections()
    assert (idle <= 16, out) == (True, 0)
    assert store.get_run(KEYS, PATIENCE_S).values == expected
    _no_more_connections_than(filled, store)
    store.close()


def _no_more_connections_than(server: RedisServer, store: RedisStore) -> None:
    """The server sees ours and the asking client's, once it has noticed those that closed."""
    with server.client() as client:
        for _ in range(10_000):
            if client.info("clients")["connected_clients"] <= sum(store.num_connections()) + 1:
                return
    raise AssertionError("connections were left behind")


def test_callers_beyond_the_bound_wait(filled: RedisServer) -> None:
    """Sixteen threads, two calls at a time: all are served, over no more than four connections."""
    store = open_store(filled.url, num_sockets=2, max_calls=2)
    expected = [value_of(key) * 400 for key in KEYS]
    with ThreadPoolExecutor(16) as pool:
        for run in pool.map(lambda _: store.get_run(KEYS, PATIENCE_S), range(32)):
            assert run.values == expected
    assert sum(store.num_connections()) <= 4
    store.close()


def test_waiting_for_a_turn_ends_by_the_deadline() -> None:
    """All turns are taken by calls that hang: the next caller is told in its own time."""
    with scripted_redis(lambda _: HANG) as server, ThreadPoolExecutor(1) as pool:
        store = open_store(server.url, max_calls=1)
        hanging = pool.submit(store.get_run, KEYS, PATIENCE_S)
        while not server.commands:
            assert not hanging.done()
        run = store.get_run(KEYS, SHORT_S)
        assert run.fault is not None and run.fault.kind is FaultKind.TIMEOUT
        store.close()
        fault = hanging.result().fault
        assert fault is not None and fault.kind is FaultKind.UNREACHABLE
