"""KvCache over a store in memory: tiers in order, one delivery each, reports that add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.core.kvblock import Tier
from antiphon.kv.cache import Delivery, KvCache
from antiphon.kv.codec import BadValueReason
from antiphon.kv.events import Change
from antiphon.kv.mackeys import MacKey, MacKeys
from antiphon.kv.store import FaultKind
from support.kvchains import (
    BLOCK_BYTES,
    CODEC,
    PATIENCE_S,
    Inbox,
    PuppetStore,
    Tales,
    chain,
    make_cache,
    payload_of,
    prefix_of,
    with_payloads,
)
from support.kvvalues import KEYS, OTHER_SCOPE

MIB = 2**20
ROTATED = MacKeys(MacKey.of(b"n" * 32), previous=KEYS.current)


@pytest.fixture
def store() -> PuppetStore:
    return PuppetStore()


@pytest.fixture
def caches(store: PuppetStore) -> Iterator[list[KvCache]]:
    """Two workers' caches over one store, the first with a host tier."""
    made = [make_cache(store, host_bytes=MIB), make_cache(store)]
    yield made
    for cache in made:
        cache.close()


def tiers(delivery: Delivery) -> list[Tier]:
    """Of the blocks, having checked that each has its own payload."""
    for block, payload, _ in delivery.blocks:
        assert bytes(payload) == payload_of(block)
    return [tier for _, _, tier in delivery.blocks]


def asked(cache: KvCache, *args: object, **prompt: object) -> Delivery:
    inbox = Inbox()
    cache.begin(prefix_of(*args, **prompt), inbox)
    return inbox.one()


def test_the_nearest_tier_serves(caches: list[KvCache]) -> None:
    """Host tier at once, on the calling thread; another worker gets the same from the store."""
    here, there = caches
    blocks = chain(4)
    here.keep(with_payloads(blocks[:3]))
    inbox = Inbox()
    here.begin(prefix_of(blocks[:3]), inbox)
    (delivery,) = inbox.all
    assert tiers(delivery) == [Tier.HOST] * 3
    assert delivery.report.decision == "none"
    assert here.drain(PATIENCE_S)
    delivery = asked(there, blocks)
    assert tiers(delivery) == [Tier.STORE] * 3
    assert delivery.report.decision == "fetched"


def test_tiers_follow_each_other_without_a_gap(caches: list[KvCache]) -> None:
    """Engine, host, store, computed: each begins where the one before it ends."""
    here, there = caches
    blocks = chain(8)
    there.keep(with_payloads(blocks[4:7]))
    assert there.drain(PATIENCE_S)
    here.keep(with_payloads(blocks[2:4]))
    delivery = asked(here, blocks, num_local=2)
    assert [block.index for block, _, _ in delivery.blocks] == [2, 3, 4, 5, 6]
    assert tiers(delivery) == [Tier.HOST] * 2 + [Tier.STORE] * 3
    report = delivery.report
    assert (report.num_local, report.num_host, report.num_store, report.num_computed) == (2, 2, 3, 1)
    assert report.fetched_bytes == 3 * BLOCK_BYTES
    assert report.saved_s == pytest.approx(5 * 16 / 100.0 - report.fetch_s)
    assert str(report).startswith("2 local, 2 host, 3 redis, 1 computed; fetched 0.0 MB in ")


def test_what_was_fetched_is_kept(caches: list[KvCache]) -> None:
    """The second time the host tier has it."""
    here, there = caches
    blocks = chain(3)
    there.keep(with_payloads(blocks))
    assert there.drain(PATIENCE_S)
    assert tiers(asked(here, blocks)) == [Tier.STORE] * 3
    assert tiers(asked(here, blocks)) == [Tier.HOST] * 3


def test_a_cold_prompt_is_computed(caches: list[KvCache]) -> None:
    """Nothing anywhere: an empty delivery, and the report says why."""
    delivery = asked(caches[0], chain(3))
    assert delivery.blocks == []
    assert (delivery.report.decision, delivery.report.num_computed) == ("missed", 3)


def test_nothing_wanted_nothing_asked(caches: list[KvCache], store: PuppetStore) -> None:
    """All is in the engine, or the prompt has no full block: answered at once."""
    for blocks in (chain(3), []):
        delivery = asked(caches[0], blocks, num_local=len(blocks))
        assert (delivery.blocks, delivery.report.decision) == ([], "none")
    assert store.runs == []


def test_without_a_store_there_is_the_host_tier() -> None:
    """Whoever runs no Redis still keeps what the engine evicts."""
    cache = make_cache(None, host_bytes=MIB)
    blocks = chain(3)
    cache.keep(with_payloads(blocks[:2]))
    delivery = asked(cache, blocks)
    assert tiers(delivery) == [Tier.HOST] * 2
    assert delivery.report.decision == "no_store"
    assert cache.drain(0.0)
    assert cache.stats().store is None
    cache.cancel("g")
    cache.close()


def test_where_computing_is_faster_nothing_is_fetched(store: PuppetStore) -> None:
    """The gate says no, the caller is told on its own thread."""
    cache = make_cache(store, prefill_tokens_per_s=1e9)
    inbox = Inbox()
    cache.begin(prefix_of(chain(3)), inbox)
    assert [delivery.report.decision for delivery in inbox.all] == ["slower"]
    assert store.runs == []
    cache.close()


def test_observations_reach_the_gate(store: PuppetStore) -> None:
    """A prefill rate far above the guess stops the fetching; so does an import that takes for ever."""
    cache = make_cache(store)
    for _ in range(200):
        cache.observe_prefill(10_000, 0.00001)
    assert asked(cache, chain(3)).report.decision == "slower"
    cache.close()
    cache = make_cache(store)
    for _ in range(200):
        cache.observe_import(1, 1.0)
    assert cache.rates.import_byte_s == pytest.approx(1.0 / BLOCK_BYTES, rel=0.01)
    assert asked(cache, chain(3)).report.decision == "slower"
    cache.close()


def test_two_scopes_share_nothing_but_what_is_public(caches: list[KvCache]) -> None:
    """The same tokens of another tenant: no tier has them, and no key of the first one is asked for."""
    here, there = caches
    for cache in caches:
        cache.keep(with_payloads(chain(4, num_public=1)))
        assert cache.drain(PATIENCE_S)
    for cache in caches:
        assert asked(cache, chain(4, scope=OTHER_SCOPE)).blocks == []
        shared = asked(cache, chain(4, scope=OTHER_SCOPE, num_public=1))
        assert [block.index for block, _, _ in shared.blocks] == [0]
    assert here.stats().num_host == 1
    assert there.stats().num_store == 1


def test_a_cancelled_generation_hears_nothing(caches: list[KvCache], store: PuppetStore) -> None:
    """The client left while its blocks were under way."""
    cache, inbox = caches[0], Inbox()
    store.hold()
    cache.begin(prefix_of(chain(3), "gone"), inbox)
    cache.cancel("gone")
    store.let_go()
    cache.begin(prefix_of(chain(3), "here"), inbox)
    assert inbox.one().generation == "here"


def test_bad_values_are_deleted_and_counted(store: PuppetStore) -> None:
    """Then the block can be written again; the operator is told once."""
    tales = Tales()
    cache = make_cache(store, tell=tales)
    blocks = chain(3)
    cache.keep(with_payloads(blocks))
    assert cache.drain(PATIENCE_S)
    key = CODEC.key(blocks[1])
    (value,) = store.inner.get_run([key], 1.0).values
    assert value is not None
    store.inner.delete([key], 1.0)
    store.inner.put(key, value[:-1] + bytes([value[-1] ^ 1]), 10**6, 1.0)
    assert tiers(asked(cache, blocks)) == [Tier.STORE]
    assert cache.drain(PATIENCE_S)
    stats = cache.stats().store
    assert stats is not None
    assert stats.bad_values == {BadValueReason.MAC: 1}
    assert stats.num_deleted == 1
    assert tales.kinds == {"bad_value"}
    assert cache.wants(blocks[1])
    cache.keep(with_payloads(blocks))
    assert cache.drain(PATIENCE_S)
    assert tiers(asked(cache, blocks)) == [Tier.STORE] * 3
    cache.close()


def test_values_of_an_unknown_key_are_misses_and_stay(store: PuppetStore) -> None:
    """A worker that has not heard of a rotation yet computes what others signed anew, and breaks nothing."""
    young, old = make_cache(store, keys=ROTATED), make_cache(store)
    blocks = chain(3)
    young.keep(with_payloads(blocks))
    assert young.drain(PATIENCE_S)
    assert asked(old, blocks).report.num_computed == 3
    old.keep(with_payloads(blocks))
    assert old.drain(PATIENCE_S)
    stats = old.stats().store
    assert stats is not None
    assert stats.bad_values == {BadValueReason.KEY: 1}
    assert (stats.num_deleted, stats.num_stored) == (0, 0)
    assert tiers(asked(young, blocks)) == [Tier.STORE] * 3
    later = chain(3, start=1000)
    old.keep(with_payloads(later))
    assert old.drain(PATIENCE_S)
    assert tiers(asked(young, later)) == [Tier.STORE] * 3, "what the old key signed is still believed"
    young.close()
    old.close()


def test_values_of_a_retired_key_are_counted_and_deleted(store: PuppetStore) -> None:
    """Whoever knows that a key has retired makes room for a value that is believed."""
    old = make_cache(store)
    keys = MacKeys(MacKey.of(b"3" * 32), MacKey.of(b"4" * 32), (KEYS.current.id,))
    young = make_cache(store, keys=keys)
    blocks = chain(3)
    old.keep(with_payloads(blocks))
    assert old.drain(PATIENCE_S)
    assert asked(young, blocks).report.num_computed == 3
    assert young.drain(PATIENCE_S)
    stats = young.stats().store
    assert stats is not None
    assert stats.bad_values == {BadValueReason.OLD_KEY: 1}
    assert stats.num_deleted == 1
    young.keep(with_payloads(blocks[:1]))
    assert young.drain(PATIENCE_S)
    assert tiers(asked(young, blocks[:1])) == [Tier.STORE]
    young.close()
    old.close()


def test_a_wrong_mac_under_a_known_key_is_deleted_by_whoever_meets_it(store: PuppetStore) -> None:
    """Also where it claims the key of before: a forger may name any key."""
    old, young = make_cache(store), make_cache(store, keys=ROTATED)
    blocks = chain(1)
    old.keep(with_payloads(blocks))
    assert old.drain(PATIENCE_S)
    key = CODEC.key(blocks[0])
    (value,) = store.inner.get_run([key], 1.0).values
    assert value is not None
    store.inner.delete([key], 1.0)
    store.inner.put(key, value[:-1] + bytes([value[-1] ^ 1]), 10**6, 1.0)
    assert asked(young, blocks).blocks == []
    assert young.drain(PATIENCE_S)
    assert store.inner.get_run([key], 1.0).values == [None]
    old.close()
    young.close()


def test_what_the_store_lost_is_written_again(caches: list[KvCache], store: PuppetStore) -> None:
    """All of it, though only its first block was looked for in vain: nothing behind that one is known."""
    cache, blocks = caches[1], chain(4)
    cache.keep(with_payloads(blocks))
    assert cache.drain(PATIENCE_S)
    store.inner.delete([CODEC.key(block) for block in blocks], 1.0)
    assert asked(cache, blocks).report.decision == "missed"
    assert all(cache.wants(block) for block in blocks)
    cache.keep(with_payloads(blocks))
    assert cache.drain(PATIENCE_S)
    assert tiers(asked(cache, blocks)) == [Tier.STORE] * 4


def test_it_says_what_is_worth_an_export(store: PuppetStore) -> None:
    """Not what the host tier has; without one, not what was written lately."""
    here, there = make_cache(store, host_bytes=MIB), make_cache(store)
    (block,) = chain(1)
    for cache in (here, there):
        assert cache.wants(block)
        cache.keep(with_payloads([block]))
        assert not cache.wants(block)
        cache.close()


def test_a_store_that_is_gone_is_a_count_and_a_line() -> None:
    """Prompts are computed, blocks stay with the writer, the operator hears of it."""
    store, tales = PuppetStore(fault=FaultKind.DENIED), Tales()
    cache = make_cache(store, tell=tales)
    cache.keep(with_payloads(chain(2)))
    decisions = {asked(cache, chain(2, start=1000 * number)).report.decision for number in range(4)}
    assert decisions <= {"fault", "open_breaker"}
    assert not cache.drain(0.02)
    stats = cache.stats()
    assert stats.store is not None
    assert stats.store.num_opened == 2
    assert stats.store.read_faults[FaultKind.DENIED] >= 1
    assert stats.store.write_faults[FaultKind.DENIED] >= 1
    assert stats.store.queued_bytes == 2 * BLOCK_BYTES
    assert [kind for kind, _ in tales.told] == ["denied"]
    cache.close()


def test_totals_add_up(caches: list[KvCache]) -> None:
    """Every block of every prompt is in exactly one column."""
    here, there = caches
    there.keep(with_payloads(chain(5)))
    assert there.drain(PATIENCE_S)
    reports = [asked(here, chain(6), num_local=1).report for _ in range(2)]
    stats = here.stats()
    assert (stats.num_lookups, stats.num_local, stats.num_host) == (2, 2, 4)
    assert (stats.num_store, stats.num_computed) == (4, 2)
    assert stats.host_hit_bytes == stats.store_hit_bytes == 4 * BLOCK_BYTES
    assert stats.saved_s == pytest.approx(sum(report.saved_s for report in reports))
    assert stats.decisions == {"fetched": 1, "missed": 1}
    assert (stats.host_blocks, stats.host_evicted) == (4, 0)


def test_the_directory_knows_the_tiers(caches: list[KvCache]) -> None:
    """Kept blocks are told as held here, then as written."""
    cache, blocks = caches[0], chain(2)
    cache.keep(with_payloads(blocks))
    assert cache.drain(PATIENCE_S)
    events = cache.directory.after(0)
    assert events is not None
    told = [(event.change, event.tier, len(event.hashes)) for event in events]
    assert told == [(Change.STORED, Tier.HOST, 2)] + [(Change.STORED, Tier.STORE, 1)] * 2


def test_use_lets_blocks_live_on(caches: list[KvCache]) -> None:
    """Whichever tier served a block, the store's copy is kept for the other workers."""
    here, there = caches
    blocks = chain(5)
    there.keep(with_payloads(blocks[:4]))
    assert there.drain(PATIENCE_S)
    for num_local, num_touched in ((1, 4), (0, 4)):
        assert len(asked(here, blocks, num_local=num_local).blocks) == 4 - num_local
        assert here.drain(PATIENCE_S)
        stats = here.stats().store
        assert stats is not None
        assert stats.num_touched == num_touched


def test_closing_answers_whoever_waits(store: PuppetStore) -> None:
    """A worker that shuts down leaves nobody waiting, and what it ends itself is no alarm."""
    tales = Tales()
    cache, inbox = make_cache(store, tell=tales), Inbox()
    store.hold()
    cache.begin(prefix_of(chain(3)), inbox)
    store.await_that(lambda: len(store.runs) == 1)
    cache.close()
    assert inbox.one().report.decision == "fault"
    assert tales.told == []


def test_the_directory_learns_what_the_store_has_and_lacks(caches: list[KvCache], store: PuppetStore) -> None:
    """What another worker wrote and was found; of a chain that ends early the first block that is missing."""
    here, there = caches
    blocks = chain(5)
    here.keep(with_payloads(blocks[:3]))
    assert here.drain(PATIENCE_S)
    asked(there, blocks)
    found = [block.hash for block in blocks[:3]]
    assert there.directory.snapshot().hashes[Tier.STORE] == set(found)
    events = there.directory.after(0)
    assert events is not None
    told = [(e.change, h) for e in events if e.tier is Tier.STORE for h in e.hashes]
    assert told == [(Change.STORED, h) for h in found] + [(Change.REMOVED, blocks[3].hash)]
