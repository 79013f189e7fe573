"""What the KV tiers may expect of any `BlockStore`: memory, and Redis in each way to reach one."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.core.clock import WallClock
from antiphon.kv.memorystore import MemoryStore
from antiphon.kv.redisstore import open_store
from antiphon.kv.store import BlockStore, FaultKind, StoreFault
from support.redisserver import make_certificates, redis_cluster, redis_sentinel, redis_server

PATIENCE_S = 20.0
TTL_MS = 60_000
MIB = 2**20


@contextlib.contextmanager
def _url_of(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        if kind == "cluster":
            yield stack.enter_context(redis_cluster()).url
        elif kind == "sentinel":
            yield stack.enter_context(redis_sentinel()).url
        elif kind == "tls":
            certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
            yield stack.enter_context(redis_server(tls=certificates)).url
        else:
            yield stack.enter_context(redis_server(unix=kind == "unix")).url


@pytest.fixture(scope="module", params=["memory", "tcp", "unix", "tls", "sentinel", "cluster"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    if request.param == "memory":
        yield MemoryStore(WallClock(), 256 * MIB)
        return
    with _url_of(request.param, tmp_path_factory) as url:
        opened = open_store(url)
        yield opened
        assert opened.num_connections()[1] == 0
        opened.close()


@pytest.fixture
def prefix() -> str:
    """Keys of one test; each ends up on any shard."""
    return f"antiphon:kv:{uuid.uuid4().hex}"


def filled(store: BlockStore, prefix: str, sizes: list[int], seed: int = 1) -> dict[str, bytes]:
    """Store values of these sizes."""
    dice = random.Random(seed)
    values = {f"{prefix}:{number}": dice.randbytes(size) for number, size in enumerate(sizes)}
    for key, value in values.items():
        assert store.put(key, value, TTL_MS, PATIENCE_S)
    return values


def test_a_run_comes_back_in_order(store: BlockStore, prefix: str) -> None:
    """Values of any size, an empty one and 4 MiB included, stand at their keys' places."""
    values = filled(store, prefix, [700, 1, 4 * MIB, 0, 65536, 65537, 3 * MIB, 16, 2, 5, 8])
    run = store.get_run(list(values), PATIENCE_S)
    assert run.values == list(values.values())
    assert run.fault is None
    assert run.num_bytes == sum(map(len, values.values()))


def test_what_is_not_there_is_a_miss(store: BlockStore, prefix: str) -> None:
    """No key of a run is there: as many None as keys, and no fault."""
    run = store.get_run([f"{prefix}:{number}" for number in range(7)], PATIENCE_S)
    assert (run.values, run.fault) == ([None] * 7, None)


def test_an_empty_run(store: BlockStore) -> None:
    """No keys, no values."""
    assert store.get_run([], PATIENCE_S).values == []


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(is_there=st.lists(st.booleans(), max_size=24))
def test_holes_keep_their_place(store: BlockStore, is_there: list[bool]) -> None:
    """Up to the first hole all values come; behind it a value is its key's or not given."""
    keys = [f"antiphon:kv:{uuid.uuid4().hex}" for _ in is_there]
    for key, is_key_there in zip(keys, is_there, strict=True):
        if is_key_there:
            assert store.put(key, key.encode() * 100, TTL_MS, PATIENCE_S)
    run = store.get_run(keys, PATIENCE_S)
    assert run.fault is None
    assert len(run.values) == len(keys)
    hole = is_there.index(False) if False in is_there else len(is_there)
    assert run.values[:hole] == [key.encode() * 100 for key in keys[:hole]]
    for key, is_key_there, value in zip(keys, is_there, run.values, strict=True):
        assert value is None or (is_key_there and value == key.encode() * 100)
    store.delete(keys, PATIENCE_S)


def test_reading_stops_soon_after_a_hole(store: BlockStore, prefix: str) -> None:
    """Far behind the first hole nothing is asked any more."""
    values = filled(store, prefix, [1000] * 40)
    keys = list(values)
    assert store.delete([keys[3]], PATIENCE_S) == 1
    run = store.get_run(keys, PATIENCE_S)
    assert run.values[:4] == [*list(values.values())[:3], None]
    assert run.values[20:] == [None] * 20


def test_a_value_is_never_replaced(store: BlockStore, prefix: str) -> None:
    """Blocks are immutable: a second put does nothing and says so."""
    assert store.put(prefix, b"first", TTL_MS, PATIENCE_S)
    assert not store.put(prefix, b"second", TTL_MS, PATIENCE_S)
    assert store.get_run([prefix], PATIENCE_S).values == [b"first"]


def test_a_value_goes_when_its_time_is_up(store: BlockStore, prefix: str) -> None:
    """A TTL of a millisecond ends."""
    assert store.put(prefix, b"brief", 1, PATIENCE_S)
    assert any(store.get_run([prefix], PATIENCE_S).values == [None] for _ in range(100_000))
    assert store.put(prefix, b"again", TTL_MS, PATIENCE_S)


def test_touch_sets_the_time_to_live(store: BlockStore, prefix: str) -> None:
    """Longer or shorter, of several keys at once; keys that are not there are fine."""
    values = filled(store, prefix, [10, 10])
    short, kept = values
    found = store.touch([(short, 1), (kept, 2 * TTL_MS), (f"{prefix}:none", 5)], PATIENCE_S)
    assert found == [True, True, False]
    assert any(store.get_run([short], PATIENCE_S).values == [None] for _ in range(100_000))
    assert store.get_run([kept], PATIENCE_S).values == [values[kept]]


def test_many_keys_are_touched_and_deleted_at_once(store: BlockStore, prefix: str) -> None:
    """More than are sent in one go; deleting counts what was there."""
    values = filled(store, prefix, [10] * 300)
    store.touch([(key, TTL_MS) for key in values], PATIENCE_S)
    assert store.delete([*values, f"{prefix}:none"], PATIENCE_S) == 300
    assert store.delete(list(values), PATIENCE_S) == 0
    store.touch([], PATIENCE_S)


def test_threads_do_not_meet(store: BlockStore, prefix: str) -> None:
    """Twelve threads read, write and delete at once: each gets its own keys' values, in order."""

    def work(number: int) -> None:
        mine = f"{prefix}:{number}"
        for turn in range(4):
            values = filled(store, f"{mine}:{turn}", [50_000 + number] * 9, seed=number)
            assert store.get_run(list(values), PATIENCE_S).values == list(values.values())
            assert store.delete(list(values), PATIENCE_S) == 9

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))


def test_ping_tells_a_round_trip(store: BlockStore) -> None:
    """Seconds, however few."""
    assert 0.0 <= store.ping(PATIENCE_S) < PATIENCE_S


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_closed_store_has_nothing(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """After close: reads are faults beside no value, all else raises."""
    with contextlib.ExitStack() as stack:
        if kind == "memory":
            closed: BlockStore = MemoryStore(WallClock(), MIB)
        else:
            closed = open_store(stack.enter_context(_url_of(kind, tmp_path_factory)))
        assert closed.put("key", b"value", TTL_MS, PATIENCE_S)
        closed.close()
        run = closed.get_run(["key"], PATIENCE_S)
        assert run.values == [None]
        assert run.fault is not None and run.fault.kind is FaultKind.UNREACHABLE
        for call in (
            lambda: closed.put("other", b"value", TTL_MS, PATIENCE_S),
            lambda: closed.touch([("key", TTL_MS)], PATIENCE_S),
            lambda: closed.delete(["key"], PATIENCE_S),
            lambda: closed.ping(PATIENCE_S),
        ):
            with pytest.raises(StoreFault) as raised:
                call()
            assert raised.value.kind is FaultKind.UNREACHABLE
        closed.close()
