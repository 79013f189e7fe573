"""Who holds a key: slots of a cluster, masters named by Sentinels, and both when servers die."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from antiphon.kv.deadline import Deadline
from antiphon.kv.redisstore import RedisStore, open_store
from antiphon.kv.redisurl import Address, Login
from antiphon.kv.resp import ErrorReply, Reply
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.stream import Dialer
from antiphon.kv.topology import SentinelTopology, SlotMap, slot_map, slot_of
from support.redisserver import RedisCluster, RedisServer, redis_cluster, redis_sentinel
from support.scriptedredis import HANG, scripted_redis

PATIENCE_S = 20.0
TTL_MS = 600_000
A, B = Address("10.0.0.1", 1), Address("10.0.0.2", 2)


@given(key=st.binary(max_size=60) | st.text("ab{}", max_size=12).map(str.encode))
def test_slots_are_those_of_redis(key: bytes) -> None:
    """For any key, with hash tags or without, as redis-py computes them."""
    assert slot_of(key) == key_slot(key)


def test_a_slot_map_finds_the_range() -> None:
    """First and last slot of each range; a gap belongs to nobody; ranges in any order."""
    reply: Reply = [
        [200, 16383, [b"10.0.0.2", 2, b"id"], [b"10.0.0.9", 9]],
        [0, 99, [b"10.0.0.1", 1, b"id", []]],
    ]
    slots = slot_map(reply, A)
    assert [slots.node_of(slot) for slot in (0, 99, 100, 199, 200, 16383)] == [A, A, None, None, B, B]
    assert slots.nodes() == [A, B]
    assert SlotMap(()).node_of(0) is None


@pytest.mark.parametrize("host", [None, b""])
def test_a_node_without_a_name_is_where_we_asked(host: bytes | None) -> None:
    """A node that does not know its own address answers so."""
    assert slot_map([[0, 16383, [host, 7]]], A).node_of(1) == Address(A.host, 7)


@pytest.mark.parametrize(
    "reply",
    [
        b"text",
        [b"text"],
        [[0, 16383]],
        [[0, 16384, [b"a", 1]]],
        [[5, 4, [b"a", 1]]],
        [[0, b"1", [b"a", 1]]],
        [[0, 1, [b"a", b"1"]]],
    ],
)
def test_what_is_no_slot_map_is_malformed(reply: Reply) -> None:
    """Nothing is taken on trust."""
    with pytest.raises(StoreFault) as raised:
        slot_map(reply, A)
    assert raised.value.kind is FaultKind.MALFORMED
    with pytest.raises(StoreFault) as raised:
        slot_map(ErrorReply("NOPERM no"), A)
    assert raised.value.kind is FaultKind.DENIED


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as running:
        yield running


def keys_of(cluster: RedisCluster, number: int, count: int, name: str = "") -> list[str]:
    """So many keys of the shard with this number; other ones for another `name`."""
    bounds = [16384 * shard // len(cluster.servers) for shard in range(len(cluster.servers) + 1)]
    names = (f"antiphon:kv:{name}{n}" for n in range(100_000))
    mine = (name for name in names if bounds[number] <= slot_of(name.encode()) < bounds[number + 1])
    return [next(mine) for _ in range(count)]


def put_all(store: RedisStore, keys: list[str]) -> list[bytes]:
    values = [key.encode() * 1000 for key in keys]
    for key, value in zip(keys, values, strict=True):
        store.put(key, value, TTL_MS, PATIENCE_S)
    return values


def test_one_master_of_a_cluster_dies() -> None:
    """Its keys are unreachable; what comes before them, and the other shards, go on; it heals."""
    with redis_cluster() as cluster:
        store = open_store(cluster.url)
        live, dead = keys_of(cluster, 0, 4) + keys_of(cluster, 2, 4), keys_of(cluster, 1, 3)
        values = put_all(store, [*live, *dead])
        cluster.servers[1].kill()
        run = store.get_run([*live, *dead], PATIENCE_S)
        assert run.values == values[: len(live)] + [None] * len(dead)
        assert run.fault is not None and run.fault.kind is FaultKind.UNREACHABLE
        assert store.get_run(live, PATIENCE_S).values == values[: len(live)]
        assert store.get_run([dead[0], *live], PATIENCE_S).values[0] is None
        with pytest.raises(StoreFault):
            store.put(dead[0], b"value", TTL_MS, PATIENCE_S)
        with pytest.raises(StoreFault):
            store.ping(PATIENCE_S)
        cluster.servers[1].start()
        cluster.servers[1].await_log("Cluster state changed: ok")
        assert store.get_run([*live, *dead], PATIENCE_S).values[: len(live)] == values[: len(live)]
        assert store.ping(PATIENCE_S) > 0
        store.close()


def test_a_stopped_master_of_a_cluster_costs_the_deadline(cluster: RedisCluster) -> None:
    """Values that lie before its keys have come by then."""
    store = open_store(cluster.url)
    keys = [key for number in range(3) for key in keys_of(cluster, number, 3, "stopped")]
    values = put_all(store, keys)
    cluster.servers[1].pause()
    run = store.get_run(keys, 0.5)
    cluster.servers[1].resume()
    assert run.values[:4] == [*values[:3], None]
    assert run.fault is not None and run.fault.kind is FaultKind.TIMEOUT
    assert store.get_run(keys, PATIENCE_S).values == values
    store.close()


def test_a_dead_seed_is_passed_over(cluster: RedisCluster) -> None:
    """Any node of the URL will do."""
    with scripted_redis(lambda _: None) as dead:
        seed = dead.url.removeprefix("redis://")
        store = open_store(cluster.url.replace("://", f"://{seed},"))
        assert store.ping(PATIENCE_S) > 0
        store.close()


def test_no_seed_answers() -> None:
    """Unreachable, naming each."""
    with scripted_redis(lambda _: None) as dead:
        seed = dead.url.removeprefix("redis://")
        store = open_store(f"redis-cluster://{seed}")
        run = store.get_run(["key"], PATIENCE_S)
        assert run.fault is not None and run.fault.kind is FaultKind.UNREACHABLE
        assert seed in run.fault.detail
        store.close()


def begin_move(source: RedisServer, target: RedisServer, key: str) -> None:
    """Move the key; the cluster still believes that its slot is at the source."""
    slot = slot_of(key.encode())
    with source.client() as old, target.client() as new:
        old_id, new_id = (client.execute_command("CLUSTER MYID") for client in (old, new))
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
        old.migrate("127.0.0.1", target.port, key, 0, 5000)


def end_move(source: RedisServer, target: RedisServer, key: str) -> None:
    """The slot is the target's now."""
    with source.client() as old, target.client() as new:
        new_id = new.execute_command("CLUSTER MYID")
        for client in (new, old):
            client.execute_command("CLUSTER SETSLOT", slot_of(key.encode()), "NODE", new_id)


def test_a_slot_that_moves() -> None:
    """-ASK while it moves, -MOVED afterwards: one retry settles either, for every call."""
    with redis_cluster() as cluster:
        store = open_store(cluster.url)
        keys = keys_of(cluster, 0, 5)
        values = put_all(store, keys)
        for move in (begin_move, end_move):
            move(cluster.servers[0], cluster.servers[1], keys[2])
            run = store.get_run(keys, PATIENCE_S)
            assert (run.values, run.fault) == (values, None)
            store.touch([(key, TTL_MS) for key in keys], PATIENCE_S)
            assert not store.put(keys[2], b"other", TTL_MS, PATIENCE_S)
            assert store.delete(keys, PATIENCE_S) == len(keys)
            assert store.get_run(keys[2:3], PATIENCE_S).values == [None]
            assert put_all(store, keys) == values
            assert store.num_connections()[1] == 0
        store.close()


def test_few_rights_are_enough_on_a_cluster(cluster: RedisCluster) -> None:
    """What a single server needs, CLUSTER SLOTS and ASKING."""
    rights = ("+get", "+set", "+pexpire", "+unlink", "+ping", "+cluster|slots", "+asking")
    for server in cluster.servers:
        with server.client() as client:
            client.execute_command("ACL SETUSER", "kv", "on", ">right", "~antiphon:kv:*", *rights)
    store = open_store(cluster.url.replace("://", "://kv:right@"))
    keys = keys_of(cluster, 0, 2, "rights") + keys_of(cluster, 1, 2, "rights")
    assert store.get_run(keys, PATIENCE_S).fault is None
    values = put_all(store, keys)
    assert store.get_run(keys, PATIENCE_S).values == values
    assert store.ping(PATIENCE_S) > 0
    store.close()


def test_sentinel_fails_over() -> None:
    """The master is killed, its replica promoted: the store finds it, with what was replicated."""
    with redis_sentinel() as watched:
        store = open_store(watched.url)
        keys = [f"antiphon:kv:{number}" for number in range(5)]
        values = put_all(store, keys)
        with watched.master.client() as client:
            assert client.wait(1, 10_000) == 1
        assert store.get_run(keys, PATIENCE_S).values == values
        watched.fail_over()
        lost = store.get_run(keys, PATIENCE_S)
        assert lost.fault is not None and lost.fault.kind is FaultKind.UNREACHABLE
        run = store.get_run(keys, PATIENCE_S)
        assert (run.values, run.fault) == (values, None)
        assert store.put("antiphon:kv:new", b"value", TTL_MS, PATIENCE_S)
        assert store.num_connections()[1] == 0
        store.close()


def sentinels(*urls: str) -> SentinelTopology:
    places = [url.removeprefix("redis://").partition(":") for url in urls]
    addresses = tuple(Address(host, int(port)) for host, _, port in places)
    return SentinelTopology(Dialer(None), addresses, "mymaster", Login())


def test_sentinels_are_asked_in_turn() -> None:
    """One that hangs, one that knows nothing, one that refuses, one that knows: the last is believed."""
    with (
        scripted_redis(lambda _: HANG) as hangs,
        scripted_redis(lambda _: b"*-1\r\n") as ignorant,
        scripted_redis(lambda _: b"-NOAUTH no\r\n") as closed,
        scripted_redis(lambda _: b"*2\r\n$8\r\n10.0.0.1\r\n$1\r\n1\r\n") as knows,
    ):
        topology = sentinels(hangs.url, ignorant.url, closed.url, knows.url)
        with pytest.raises(StoreFault):
            topology.node_of(b"key")
        topology.learn(Deadline(1.0))
        assert (topology.nodes(), topology.node_of(b"key")) == ([A], A)
        topology.learn(Deadline(1.0))
        assert len(knows.commands) == 1
        topology.suspect(A)
        assert topology.nodes() == []
        nobody = sentinels(ignorant.url, closed.url)
        with pytest.raises(StoreFault, match=r"knows no master mymaster.*NOAUTH") as raised:
            nobody.learn(Deadline(1.0))
        assert raised.value.kind is FaultKind.UNREACHABLE
