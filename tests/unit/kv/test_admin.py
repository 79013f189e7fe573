"""What operators ask of a store: keys, sizes, servers, rights, speed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.kv.admin import StoreAdmin, open_admin
from antiphon.kv.redisstore import open_store
from antiphon.kv.store import FaultKind, StoreFault
from support.redisserver import RedisServer, free_port, redis_cluster, redis_server
from support.scriptedredis import scripted_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server("--maxmemory", "50mb", "--maxmemory-policy", "volatile-ttl") as running:
        yield running


def fill(server: RedisServer, names: list[str]) -> None:
    with server.client() as client:
        for name in names:
            client.set(name, name * 3)


def scanned(admin: StoreAdmin, match: str) -> set[str]:
    return {key for keys in admin.scan(match) for key in keys}


def test_keys_are_walked_sized_and_deleted(server: RedisServer) -> None:
    """More than fit into one step; only those that match."""
    mine = [f"antiphon:kv:{number}" for number in range(2500)]
    fill(server, [*mine, "others:1"])
    with open_admin(server.url) as admin:
        assert scanned(admin, "antiphon:kv:*") == set(mine)
        assert admin.sizes([mine[7], "none", mine[2000]]) == [3 * len(mine[7]), None, 3 * len(mine[2000])]
        assert sum(admin.delete(keys) for keys in admin.scan("antiphon:kv:*")) == 2500
        assert scanned(admin, "*") == {"others:1"}
        assert admin.delete(["none"]) == 0


def test_a_cluster_is_walked_shard_by_shard() -> None:
    """All keys of all shards, and all servers."""
    with redis_cluster() as cluster, open_admin(cluster.url) as admin:
        names = [f"antiphon:kv:{number}" for number in range(60)]
        store = open_store(cluster.url)
        for name in names:
            store.put(name, b"value", 60_000, 20.0)
        store.close()
        assert scanned(admin, "antiphon:kv:*") == set(names)
        facts = admin.servers()
        assert sorted(fact.address for fact in facts) == sorted(
            f"127.0.0.1:{s.port}" for s in cluster.servers
        )
        assert sum(fact.num_keys for fact in facts) == 60
        assert admin.sizes(names) == [5] * 60
        assert admin.delete(names) == 60
        assert [right.refusal for right in admin.rights()] == [None] * 8


def test_a_server_shows_its_settings(server: RedisServer) -> None:
    """Version, memory, policy, persistence: what doctor judges."""
    fill(server, ["a", "b"])
    with open_admin(server.url) as admin:
        (facts,) = admin.servers()
    assert facts.address == f"127.0.0.1:{server.port}"
    assert int(facts.version.split(".")[0]) >= 6
    assert (facts.role, facts.num_keys, facts.num_evicted) == ("master", 2, 0)
    assert (facts.max_memory_bytes, facts.policy) == (50 * 2**20, "volatile-ttl")
    assert facts.used_memory_bytes is not None and facts.used_memory_bytes > 0
    assert (facts.is_append_only, facts.save, facts.io_threads) == (False, "", 1)


def test_what_a_server_does_not_tell_is_unknown() -> None:
    """A managed server forbids CONFIG and says little of itself."""
    info = b"redis_version:7.2.4\r\nvalkey_version:8.1.8\r\nrole:master\r\n"
    with (
        scripted_redis(
            lambda command: (
                b"$%d\r\n%s\r\n" % (len(info), info) if command[0] == b"INFO" else b"-NOPERM no\r\n"
            )
        ) as managed,
        open_admin(managed.url) as admin,
    ):
        (facts,) = admin.servers()
    assert (facts.version, facts.role, facts.num_keys) == ("8.1.8", "master", 0)
    unknown = (facts.policy, facts.save, facts.io_threads, facts.max_memory_bytes, facts.is_append_only)
    assert unknown == (None,) * 5


def test_rights_name_what_is_refused() -> None:
    """Each command is really tried; nothing is left behind."""
    rights = ("~antiphon:kv:*", "-@all", "+get", "+pexpire", "+unlink", "+ping", "+set", "+scan")
    with redis_server("--user", "kv", "on", ">right", *rights) as server:
        with open_admin(server.url.replace("://", "://kv:right@")) as admin:
            refused = {right.command: right for right in admin.rights() if right.refusal is not None}
        assert refused.keys() == {"STRLEN", "INFO"}
        assert all("NOPERM" in (right.refusal or "") for right in refused.values())
        assert refused["INFO"].user == "antiphon doctor"
        with server.client() as client:
            assert client.dbsize() == 0


def test_rights_of_a_login_that_is_none(server: RedisServer) -> None:
    """Everything is refused, and says why."""
    with open_admin(server.url.replace("://", "://kv:wrong@")) as admin:
        assert all("WRONGPASS" in (right.refusal or "") for right in admin.rights())


def test_speed_is_measured_and_leaves_nothing(server: RedisServer) -> None:
    """Round trip and both directions."""
    with open_admin(server.url) as admin:
        speed = admin.speed(100_000)
    assert min(speed.rtt_s, speed.put_bytes_s, speed.get_bytes_s) > 0
    with server.client() as client:
        assert client.dbsize() == 0


def test_nobody_there_is_a_fault() -> None:
    """Every question of a server that is not there raises, rights too."""
    with open_admin(f"redis://127.0.0.1:{free_port()}") as admin:
        for ask in (lambda: scanned(admin, "*"), admin.servers, admin.rights, admin.speed):
            with pytest.raises(StoreFault) as raised:
                ask()
            assert raised.value.kind is FaultKind.UNREACHABLE


@pytest.mark.parametrize("reply", [b"$1\r\n0\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n:0\r\n*0\r\n"])
def test_a_page_that_is_none_is_malformed(reply: bytes) -> None:
    """A walk does not go on over nonsense."""
    with scripted_redis(lambda _: reply) as odd, open_admin(odd.url) as admin:
        with pytest.raises(StoreFault) as raised:
            scanned(admin, "*")
        assert raised.value.kind is FaultKind.MALFORMED
