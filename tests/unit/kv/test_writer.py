"""The write-behind writer: order, bounds, faults, slides of TTLs, deletions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from antiphon.core.clock import VirtualClock, WallClock
from antiphon.core.kvblock import KvBlock
from antiphon.core.scope import tenant_part_of
from antiphon.kv.breaker import Breaker, BreakerSettings, BreakerState
from antiphon.kv.memorystore import MemoryStore
from antiphon.kv.store import FaultKind, StoreFault
from antiphon.kv.ttl import TtlPolicy
from antiphon.kv.writer import Writer, WriterParts, WriterSettings
from support.kvchains import BLOCK_BYTES, CODEC, PATIENCE_S, PuppetStore, chain, payload_of, with_payloads
from support.kvvalues import OTHER_SCOPE, SCOPE

SETTINGS = WriterSettings(most_bytes=4 * BLOCK_BYTES)


class Desk:
    """A writer, its store, and what it told."""

    def __init__(self, settings: WriterSettings = SETTINGS) -> None:
        self.clock = VirtualClock()
        self.store = PuppetStore(MemoryStore(self.clock, 2**20))
        self.breaker = Breaker(BreakerSettings(), random.Random(1).random)
        self.stored: list[KvBlock] = []
        self.lost: list[KvBlock] = []
        self.faults: list[StoreFault] = []
        self.told: Callable[[], None] = lambda: None
        parts = WriterParts(
            self.store,
            CODEC,
            self.breaker,
            TtlPolicy(),
            self.clock,
            self.stored.append,
            self.lost.extend,
            self._failed,
        )
        self.writer = Writer(parts, settings)

    def _failed(self, fault: StoreFault) -> None:
        self.faults.append(fault)
        self.told()

    def put(self, blocks: list[KvBlock]) -> None:
        """Offer and wait until it is done with."""
        self.writer.offer(with_payloads(blocks))
        self.drained()

    def drained(self) -> None:
        assert self.writer.drain(PATIENCE_S)

    def hold(self, block: KvBlock) -> None:
        """The writer stands still in the store, with this block."""
        self.store.hold()
        num_puts = self.store.num_puts
        self.writer.offer(with_payloads([block]))
        self.store.await_that(lambda: self.store.num_puts > num_puts)

    def values(self, blocks: list[KvBlock]) -> list[bytes | None]:
        return self.store.inner.get_run([CODEC.key(block) for block in blocks], 1.0).values


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.store.let_go()
    made.writer.close()


def test_what_is_offered_is_stored(desk: Desk) -> None:
    """Encoded, under its key, with the TTL of its depth."""
    blocks = chain(3)
    desk.put(blocks)
    for block, value in zip(blocks, desk.values(blocks), strict=True):
        assert value is not None
        assert bytes(CODEC.decode(block, value)) == payload_of(block)
    counts = desk.writer.counts()
    assert (counts.num_stored, counts.num_dropped) == (3, 0)
    assert desk.stored == blocks
    assert desk.writer.num_bytes_queued == 0
    policy = TtlPolicy()
    desk.clock.advance(policy.ttl_ms(2, blocks[2].hash) / 1000)
    assert [value is not None for value in desk.values(blocks)] == [True, True, False]


def test_a_full_queue_refuses_what_comes_new(desk: Desk) -> None:
    """The front of the chain is written, its end is dropped and counted; nobody waits."""
    (first,) = chain(1, start=1000)
    desk.hold(first)
    blocks = chain(6)
    desk.writer.offer(with_payloads(blocks))
    assert desk.writer.counts().num_dropped == 3
    assert desk.writer.num_bytes_queued == SETTINGS.most_bytes
    desk.store.let_go()
    desk.drained()
    assert desk.stored == [first, *blocks[:3]]


def test_nothing_is_written_twice(desk: Desk) -> None:
    """Neither what waits nor what was written lately."""
    blocks = chain(2)
    desk.hold(blocks[0])
    desk.writer.offer(with_payloads(blocks))
    desk.writer.offer(with_payloads(blocks))
    desk.store.let_go()
    desk.put(blocks)
    assert desk.store.num_puts == 2
    assert desk.stored == blocks


def test_it_says_what_it_wants(desk: Desk) -> None:
    """Not what waits or was written lately, and nothing where there is no room."""
    one, *rest = chain(5)
    assert desk.writer.wants(one, BLOCK_BYTES)
    desk.hold(one)
    assert not desk.writer.wants(one, BLOCK_BYTES)
    desk.writer.offer(with_payloads(rest[:3]))
    assert not desk.writer.wants(rest[3], BLOCK_BYTES)
    desk.store.let_go()
    desk.drained()
    assert not desk.writer.wants(one, BLOCK_BYTES)
    assert desk.writer.wants(rest[3], BLOCK_BYTES)


def test_a_block_that_the_store_lost_is_written_again(desk: Desk) -> None:
    """A fetch that missed it makes the writer forget; so does time."""
    blocks = chain(1)
    desk.put(blocks)
    desk.writer.forget(blocks)
    desk.put(blocks)
    assert desk.writer.counts().num_existing == 1
    desk.clock.advance(SETTINGS.written_s)
    desk.put(blocks)
    assert desk.writer.counts().num_existing == 2


def test_another_workers_block_lives_on(desk: Desk) -> None:
    """It is there already: not written, but its TTL slides, for it was used."""
    (block,) = chain(1)
    desk.store.inner.put(CODEC.key(block), b"another's", 1000, 1.0)
    desk.put([block])
    counts = desk.writer.counts()
    assert (counts.num_stored, counts.num_existing, counts.num_touched) == (0, 1, 1)
    desk.clock.advance(100.0)
    assert desk.values([block]) == [b"another's"]


def test_use_slides_the_ttl_once_in_a_while(desk: Desk) -> None:
    """Batched, and for each block at most once per pause, the writing counting as a use."""
    blocks = chain(2)
    desk.put(blocks)
    totals = []
    for _ in range(5):
        desk.writer.touch(blocks)
        desk.drained()
        totals.append(desk.writer.counts().num_touched)
        desk.clock.advance(SETTINGS.touch_every_s / 2)
    assert totals == [0, 0, 2, 2, 4]


def test_touched_blocks_outlive_their_first_ttl(desk: Desk) -> None:
    """Sliding is what keeps a conversation in the store."""
    blocks = chain(1)
    desk.put(blocks)
    for _ in range(4):
        desk.clock.advance(1500.0)
        desk.writer.touch(blocks)
        desk.drained()
    assert desk.values(blocks)[0] is not None


def test_a_slide_tells_what_the_store_lost(desk: Desk) -> None:
    """It is told, may be written again, and does not count as slid."""
    blocks = chain(4)
    desk.put(blocks)
    desk.store.inner.delete([CODEC.key(block) for block in blocks[2:]], 1.0)
    desk.clock.advance(SETTINGS.touch_every_s)
    desk.writer.touch(blocks)
    desk.drained()
    assert desk.lost == blocks[2:]
    assert desk.writer.counts().num_touched == 2
    assert [desk.writer.wants(block, BLOCK_BYTES) for block in blocks] == [False, False, True, True]
    desk.put(blocks)
    assert desk.writer.counts().num_stored == 6


def test_after_an_outage_use_looks_whether_blocks_are_there(desk: Desk) -> None:
    """However lately they were written: it may have come back empty."""
    blocks = chain(2)
    desk.put(blocks)
    desk.store.write_fault = FaultKind.OUT_OF_MEMORY
    desk.told = lambda: setattr(desk.store, "write_fault", None)
    desk.store.inner.delete([CODEC.key(block) for block in blocks], 1.0)
    desk.writer.offer(with_payloads(chain(1, start=1000)))
    desk.store.await_that(lambda: desk.store.num_puts == 3)
    for _ in range(200):
        desk.clock.advance(1.0)
        desk.writer.spoil(chain(1, start=2000)[0])  # wakes it: its clock does not
        if desk.writer.drain(0.05):
            break
    desk.writer.touch(blocks)
    desk.drained()
    assert desk.lost == blocks


def test_what_another_key_signed_is_left_alone(desk: Desk) -> None:
    """Neither deleted nor kept alive; when its time is over the block is written, and slides as all do."""
    (block,) = chain(1)
    desk.store.inner.put(CODEC.key(block), b"signed by others", 50_000, 1.0)
    desk.writer.leave(block)
    desk.writer.touch([block])
    desk.put([block])
    counts = desk.writer.counts()
    assert (counts.num_existing, counts.num_touched, counts.num_deleted) == (1, 0, 0)
    assert desk.values([block]) == [b"signed by others"]
    desk.clock.advance(SETTINGS.written_s)
    desk.put([block])
    desk.clock.advance(SETTINGS.touch_every_s)
    desk.writer.touch([block])
    desk.drained()
    counts = desk.writer.counts()
    assert (counts.num_stored, counts.num_touched) == (1, 1)


def test_spoilt_values_are_deleted(desk: Desk) -> None:
    """And may be written again at once."""
    (block,) = chain(1)
    desk.put([block])
    desk.writer.spoil(block)
    desk.drained()
    assert desk.values([block]) == [None]
    assert desk.writer.counts().num_deleted == 1
    desk.put([block])
    assert desk.writer.counts().num_stored == 2


@pytest.mark.parametrize("kind", [FaultKind.OUT_OF_MEMORY, FaultKind.READ_ONLY, FaultKind.MISCONFIGURED])
def test_a_store_that_refuses_writes_is_rested(desk: Desk, kind: FaultKind) -> None:
    """One refusal stops the writing; what waits stays and is written when the store takes it again."""
    desk.store.write_fault = kind
    desk.store.hold()
    blocks = chain(3)
    desk.writer.offer(with_payloads(blocks))
    desk.store.let_go()
    assert not desk.writer.drain(0.05)
    assert desk.store.num_puts == 1
    assert desk.breaker.state is BreakerState.OPEN
    assert desk.writer.counts().failed == {kind: 1}
    assert [fault.kind for fault in desk.faults] == [kind]
    desk.store.write_fault = None
    desk.clock.advance(1.0)
    desk.writer.offer([])  # wakes it: the clock is ours
    desk.drained()
    assert desk.stored == blocks


def test_a_write_whose_end_is_unknown_is_given_up(desk: Desk) -> None:
    """It may be there or not; the next ones are tried."""
    desk.store.write_fault = FaultKind.TIMEOUT
    blocks = chain(2)
    desk.put(blocks)
    assert desk.writer.counts().failed == {FaultKind.TIMEOUT: 2}
    assert desk.writer.num_bytes_queued == 0
    desk.store.write_fault = None
    desk.put(blocks)
    assert desk.stored == blocks


def test_memory_is_bounded() -> None:
    """Of the blocks written or touched only so many are remembered: a forgotten one is offered again."""
    desk = Desk(WriterSettings(most_bytes=2**20, most_remembered=4))
    blocks = chain(6)
    desk.put(blocks)
    desk.put(blocks[:2])
    desk.put(blocks[:2])
    assert desk.store.num_puts == 8
    desk.writer.close()


def test_it_says_when_what_is_queued_is_written(desk: Desk) -> None:
    """Not before, and whatever is offered later; at once where nothing is queued."""
    said: list[str] = []
    desk.writer.when_written(lambda: said.append("nothing queued"))
    assert said == ["nothing queued"]
    one, two, later = chain(3)
    desk.hold(one)
    desk.writer.offer(with_payloads([two]))
    done = threading.Event()

    def written() -> None:
        said.append(f"{desk.stored.count(one)} {desk.stored.count(two)}")
        done.set()

    desk.writer.when_written(written)
    desk.writer.offer(with_payloads([later]))
    assert len(said) == 1
    desk.store.let_go()
    assert done.wait(PATIENCE_S)
    assert said[1] == "1 1"


def test_a_store_that_fails_keeps_nobody_waiting(desk: Desk) -> None:
    """Who waits is told with the first failure, and at once while the store rests."""
    said: list[str] = []
    done = threading.Event()
    one, two = chain(2)
    desk.hold(one)
    desk.writer.offer(with_payloads([two]))
    desk.writer.when_written(done.set)
    desk.store.write_fault = FaultKind.FULL
    desk.store.let_go()
    assert done.wait(PATIENCE_S)
    assert desk.writer.num_bytes_queued == 2 * BLOCK_BYTES, "postponed, not given up"
    desk.writer.when_written(lambda: said.append("at once"))
    assert said == ["at once"]


def test_closing_tells_who_waits() -> None:
    """The queue is dropped; nobody is left behind."""
    made, done = Desk(), threading.Event()
    made.hold(chain(1)[0])
    made.writer.when_written(done.set)
    made.store.let_go()
    made.writer.close()
    assert done.wait(PATIENCE_S)


def test_closing_does_not_wait_for_the_queue() -> None:
    """What is queued is dropped, what comes later too."""
    desk = Desk()
    desk.store.write_fault = FaultKind.READ_ONLY
    desk.writer.offer(with_payloads(chain(3)))
    desk.writer.close()
    desk.writer.offer(with_payloads(chain(1, start=1000)))
    assert desk.writer.counts().num_dropped == 1
    assert desk.stored == []


def test_a_wall_clock_lets_it_try_again_by_itself() -> None:
    """Nobody has to wake it: the breaker's pause ends, and what waits is written."""
    store = PuppetStore(write_fault=FaultKind.READ_ONLY)
    stored: list[KvBlock] = []

    def heal(fault: StoreFault) -> None:
        store.write_fault = None

    breaker = Breaker(BreakerSettings(min_retry_s=0.01), lambda: 0.0)
    writer = Writer(
        WriterParts(store, CODEC, breaker, TtlPolicy(), WallClock(), stored.append, lambda lost: None, heal),
        SETTINGS,
    )
    blocks = chain(3)
    writer.offer(with_payloads(blocks))
    assert writer.drain(PATIENCE_S)
    assert stored == blocks
    writer.close()


def test_a_bug_costs_a_write_and_not_the_thread(desk: Desk) -> None:
    """What no store should raise is counted as a failure of it; the next block is written."""
    first, second = chain(2)
    desk.store.bug = RuntimeError("not the protocol")
    desk.put([first])
    assert [fault.kind for fault in desk.faults] == [FaultKind.OTHER]
    assert desk.writer.num_bytes_queued == 0
    desk.store.bug = None
    desk.put([second])
    assert desk.stored == [second]


def test_what_is_queued_of_a_forgotten_tenant_is_given_up(desk: Desk) -> None:
    """It never reaches the store, its room is free, and who waits for it to be written waits no longer."""
    (first,) = chain(1, start=1000, scope=OTHER_SCOPE)
    desk.hold(first)
    mine, theirs = chain(2), chain(1, start=2000, scope=OTHER_SCOPE)
    desk.writer.offer(with_payloads([*mine, *theirs]))
    is_settled = threading.Event()
    desk.writer.when_written(is_settled.set)
    desk.writer.drop({tenant_part_of(SCOPE)})
    assert desk.writer.num_bytes_queued == 2 * BLOCK_BYTES
    desk.store.let_go()
    desk.drained()
    assert is_settled.wait(PATIENCE_S)
    assert desk.stored == [first, *theirs]
    assert desk.values(mine) == [None, None]
    desk.put(mine)  # offered anew it is written: nothing remembers that it was there
    assert desk.stored[2:] == mine
