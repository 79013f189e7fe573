"""KvCache over a real Redis that hangs, dies, evicts, refuses and lies: slower at worst, never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from bench.faultproxy import FaultProxy, Faults

from antiphon.core.kvblock import KvBlock, Tier
from antiphon.kv.breaker import BreakerState
from antiphon.kv.cache import Delivery, KvCache
from antiphon.kv.codec import BadValueReason
from antiphon.kv.redisstore import open_store
from antiphon.kv.stats import StoreStats
from antiphon.kv.store import FaultKind
from support.kvchains import (
    BLOCK_BYTES,
    CODEC,
    PATIENCE_S,
    Inbox,
    Tales,
    chain,
    make_cache,
    payload_of,
    prefix_of,
    until,
    with_payloads,
)
from support.kvvalues import OTHER_SCOPE
from support.redisserver import RedisServer, redis_server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@contextmanager
def cache_of(url: str, *, patience_s: float = 1.0, tell: Tales | None = None) -> Iterator[KvCache]:
    """A worker's cache without a host tier."""
    cache = make_cache(open_store(url), patience_s=patience_s, tell=tell)
    try:
        yield cache
    finally:
        cache.close()


def store(cache: KvCache, blocks: Sequence[KvBlock]) -> None:
    cache.keep(with_payloads(blocks))
    assert cache.drain(PATIENCE_S)


def ask(cache: KvCache, blocks: Sequence[KvBlock]) -> Delivery:
    """A delivery, checked: contiguous from the first block on, each payload the right one."""
    inbox = Inbox()
    cache.begin(prefix_of(blocks), inbox)
    delivery = inbox.one()
    assert [block for block, _, _ in delivery.blocks] == list(blocks[: len(delivery.blocks)])
    for block, payload, tier in delivery.blocks:
        assert bytes(payload) == payload_of(block)
        assert tier is Tier.STORE
    return delivery


def stats_of(cache: KvCache) -> StoreStats:
    stats = cache.stats().store
    assert stats is not None
    return stats


def test_a_hung_redis_costs_a_few_waits_and_heals(redis: RedisServer) -> None:
    """F03: stopped, it still accepts; every request is answered, the breaker opens, and closes again."""
    blocks = chain(8)
    with cache_of(redis.url, patience_s=0.04) as cache:
        store(cache, blocks)
        until(lambda: len(ask(cache, blocks).blocks) == 8)
        redis.pause()
        decisions = [ask(cache, blocks).report.decision for _ in range(20)]
        assert 1 <= decisions.count("late") <= 5
        assert set(decisions) <= {"late", "open_breaker", "slower"}
        assert decisions[-1] != "late"
        until(lambda: stats_of(cache).read_breaker is not BreakerState.CLOSED)
        redis.resume()
        until(lambda: len(ask(cache, blocks).blocks) == 8)
        assert stats_of(cache).read_breaker is BreakerState.CLOSED


def test_redis_killed_and_back(redis: RedisServer) -> None:
    """F02: gone is noticed at once and costs nothing; back and empty it is filled again."""
    blocks, tales = chain(4), Tales()
    with cache_of(redis.url, tell=tales) as cache:
        store(cache, blocks)
        redis.kill()
        decisions = {ask(cache, blocks).report.decision for _ in range(10)}
        assert decisions == {"fault", "open_breaker"}
        assert tales.kinds == {"unreachable"}
        redis.start()
        until(lambda: ask(cache, blocks).report.decision == "missed")
        store(cache, blocks)
        assert len(ask(cache, blocks).blocks) == 4


def test_redis_absent_at_the_start() -> None:
    """F01: the cache starts, computes everything, and stops."""
    with redis_server() as server:
        url = server.url
    with cache_of(url) as cache:
        cache.keep(with_payloads(chain(2)))
        assert ask(cache, chain(2)).blocks == []
        assert not cache.drain(0.05)


def test_killed_in_the_middle_of_writing(redis: RedisServer) -> None:
    """Readers find whole values only and use the front; what was queued is written after the restart."""
    blocks = chain(600)
    with cache_of(redis.url) as writer, cache_of(redis.url) as reader:
        writer.keep(with_payloads(blocks))
        until(lambda: stats_of(writer).num_stored >= 20)
        redis.kill()
        redis.start()
        assert writer.drain(PATIENCE_S)
        until(lambda: stats_of(reader).read_breaker is BreakerState.CLOSED)
        ask(reader, blocks)
        written = stats_of(writer)
        assert written.num_stored + sum(written.write_faults.values()) >= len(blocks)
        writer.keep(with_payloads(blocks))
        store(writer, blocks)
        assert not stats_of(reader).bad_values


def test_a_full_redis_evicts_leaves_and_fronts_stay_usable() -> None:
    """F08: 20 MB under volatile-ttl take six times as much; whatever is used is the front of its chain."""
    payload_bytes = 10 * BLOCK_BYTES
    full = ("--maxmemory", "20mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    with redis_server(*full) as server, cache_of(server.url) as cache:
        chains = [chain(20, start=10_000 * number) for number in range(150)]
        for blocks in chains:
            cache.keep([(block, payload_of(block, payload_bytes)) for block in blocks])
            assert cache.drain(PATIENCE_S)
        with server.client() as client:
            assert client.info("stats")["evicted_keys"] > 1000
            present = {key.decode() for key in client.keys("antiphon:kv:*")}
        num_present = num_used = 0
        for blocks in chains:
            num_present += sum(CODEC.key(block) in present for block in blocks)
            inbox = Inbox()
            cache.begin(prefix_of(blocks), inbox)
            delivered = inbox.one().blocks
            assert [block for block, _, _ in delivered] == blocks[: len(delivered)]
            assert all(bytes(payload) == payload_of(block, payload_bytes) for block, payload, _ in delivered)
            num_used += len(delivered)
        assert not stats_of(cache).bad_values
        assert 300 < num_used <= num_present
        assert num_used > 0.9 * num_present


def test_a_redis_that_is_full_and_does_not_evict_is_still_read() -> None:
    """F09: writes are refused, counted, told once and rested; reads hit."""
    tales = Tales()
    full = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    with redis_server(*full) as server, cache_of(server.url, tell=tales) as cache:
        store(cache, chain(4))
        cache.keep([(block, bytes(2**20)) for block in chain(20, start=1000)])
        until(lambda: stats_of(cache).write_faults.get(FaultKind.OUT_OF_MEMORY, 0) >= 2)
        assert len(ask(cache, chain(4)).blocks) == 4
        stats = stats_of(cache)
        assert stats.write_breaker is not BreakerState.CLOSED
        assert stats.read_breaker is BreakerState.CLOSED
        assert tales.kinds == {"out_of_memory"}
        assert len(tales.told) == 1


def test_a_redis_that_denies_is_a_miss_and_one_line(redis: RedisServer) -> None:
    """F10: an account that may do nothing; no tight retries, one line."""
    tales = Tales()
    with redis.client() as client:
        client.acl_setuser("default", enabled=True, nopass=True, commands=["-@all", "+acl", "+auth"])
    with cache_of(redis.url, tell=tales) as cache:
        decisions = {ask(cache, chain(3)).report.decision for _ in range(50)}
        assert decisions <= {"fault", "open_breaker"}
        assert sum(stats_of(cache).read_faults.values()) <= 5
        assert tales.kinds == {"denied"}
        with redis.client() as client:
            client.acl_setuser("default", enabled=True, nopass=True, commands=["+@all"], keys=["*"])
        until(lambda: ask(cache, chain(3)).report.decision == "missed")


def test_spoilt_values_are_deleted_and_counted(redis: RedisServer) -> None:
    """F11 over the wire: a flipped bit, a cut value, another block's value; each once, then gone."""
    draw = random.Random(7)
    blocks = chain(30)
    with cache_of(redis.url) as cache, redis.client() as client:
        store(cache, blocks)
        keys = [CODEC.key(block) for block in blocks]
        values = [bytearray(client.get(key)) for key in keys]
        for number in range(30):
            spoilt = bytearray(values[number])
            if number % 3 == 0:
                place = draw.randrange(len(spoilt))
                spoilt[place] ^= 1 << draw.randrange(8)
            elif number % 3 == 1:
                del spoilt[draw.randrange(len(spoilt)) :]
            else:
                spoilt = values[number - 1]
            client.set(keys[number], bytes(spoilt))
        for first in range(30):
            assert ask(cache, blocks[first:]).blocks == []
        until(lambda: stats_of(cache).num_deleted == 30)
        assert sum(stats_of(cache).bad_values.values()) == 30
        assert client.dbsize() == 0


def test_a_reply_that_is_cut_or_changed_on_the_way(redis: RedisServer) -> None:
    """F06, F07: silence, a reset, a flipped byte in the middle of a run; then all is well again."""
    blocks = chain(10)
    value_bytes = BLOCK_BYTES + 150
    with FaultProxy.to_port(redis.port) as proxy, cache_of(proxy.url, patience_s=0.3) as cache:
        store(cache, blocks)
        assert len(ask(cache, blocks).blocks) == 10
        for faults, decision in (
            (Faults(swallow_after=3 * value_bytes), "late"),
            (Faults(reset_after=3 * value_bytes), "fault"),
            (Faults(flip_at=2 * value_bytes), "fetched"),
        ):
            proxy.cut()
            proxy.faults = faults
            until(lambda: ask(cache, blocks).report.decision in (decision, "open_breaker"))  # noqa: B023
            proxy.faults = Faults()
            proxy.cut()
            cache.keep(with_payloads(blocks))
            assert cache.drain(PATIENCE_S)
            until(lambda: len(ask(cache, blocks).blocks) == 10)
        assert set(stats_of(cache).bad_values) <= {BadValueReason.MAC}


def test_a_late_redis_is_bypassed_and_taken_up_again(redis: RedisServer) -> None:
    """F05: answers half a second late are not waited for; when they come at once they are used."""
    blocks = chain(10)
    with FaultProxy.to_port(redis.port) as proxy, cache_of(proxy.url, patience_s=0.04) as cache:
        store(cache, blocks)
        until(lambda: len(ask(cache, blocks).blocks) == 10)
        proxy.faults = Faults(delay_s=0.5)
        decisions = [ask(cache, blocks).report.decision for _ in range(30)]
        assert decisions.count("late") <= 5
        until(lambda: stats_of(cache).rates.rtt_s > 0.04)
        assert ask(cache, blocks).report.decision in ("slower", "open_breaker")
        proxy.faults = Faults()
        until(lambda: len(ask(cache, blocks).blocks) == 10)


def test_tenants_share_nothing(redis: RedisServer) -> None:
    """F18 for the tier: the same tokens under another scope find nothing, in both directions."""
    with cache_of(redis.url) as cache, redis.client() as client:
        store(cache, chain(5))
        client.config_resetstat()
        assert ask(cache, chain(5, scope=OTHER_SCOPE)).report.decision == "missed"
        assert client.info("stats")["keyspace_hits"] == 0
        store(cache, chain(5, scope=OTHER_SCOPE))
        assert client.dbsize() == 10
