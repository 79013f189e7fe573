"""Writes blocks to the store behind the answers, on a thread of its own.

Owns the write queue and its bound in bytes. Nobody waits for a write, and nothing is lost by one that
does not happen: the block is computed again. Order is the order of offers, so a chain's front is stored
first. A full queue refuses what comes new: were the oldest dropped, the fronts of chains would go and
what is stored behind them would be worthless. Blocks are encoded (copied and authenticated) here, not
on the engine's thread.

Also here, because they are writes too: TTLs of blocks that were used slide, each at most once per
`touch_every_s`; bad values are deleted. A slide tells what the store lost (evicted, restarted, flushed):
that may be written again. What another key signed is left alone: it is of use to who has that key, and
ends by its TTL, which is not slid here. A breaker of its own rests a store that refuses writes, while reads
go on.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from antiphon.core.blockhash import BlockHash
from antiphon.core.clock import Clock
from antiphon.core.kvblock import KvBlock
from antiphon.core.scope import tenant_part_of
from antiphon.kv.breaker import REFUSALS, Breaker
from antiphon.kv.codec import BlockCodec
from antiphon.kv.hosttier import Payload
from antiphon.kv.store import BlockStore, FaultKind, StoreFault
from antiphon.kv.ttl import TtlPolicy

_CLOSE_S = 2.0
_MOST_COMMANDS = 4096  # keys to touch or delete that may wait
_TOUCH_BATCH = 256
# The store's state is at fault, not the write: it is done when the store is well again.
_POSTPONED = REFUSALS | {FaultKind.UNREACHABLE, FaultKind.LOADING}


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Bounds and times of the write-behind queue."""

    most_bytes: int = 128 * 2**20
    timeout_s: float = 1.0
    most_remembered: int = 65536  # hashes lately written or touched
    written_s: float = 300.0  # a block written so lately is not written again
    touch_every_s: float = 10.0


@dataclass(slots=True)
class WriteCounts:
    """Totals since the start, in blocks."""

    num_stored: int = 0
    num_existing: int = 0  # another worker was first
    num_dropped: int = 0  # the queue was full
    num_touched: int = 0
    num_deleted: int = 0
    num_bytes: int = 0  # stored
    failed: Counter[FaultKind] = field(default_factory=Counter)  # calls


class _Memory:
    """Hashes and when something was done to them; the longest known are forgotten first."""

    def __init__(self, most: int, lasts_s: float) -> None:
        self._most = most
        self._lasts_s = lasts_s
        self._done_s: OrderedDict[BlockHash, float] = OrderedDict()

    def holds(self, block_hash: BlockHash, now: float) -> bool:
        done_s = self._done_s.get(block_hash)
        return done_s is not None and now - done_s < self._lasts_s

    def add(self, block_hash: BlockHash, now: float) -> None:
        self._done_s[block_hash] = now
        self._done_s.move_to_end(block_hash)
        if len(self._done_s) > self._most:
            self._done_s.popitem(last=False)

    def drop(self, block_hash: BlockHash) -> None:
        self._done_s.pop(block_hash, None)

    def clear(self) -> None:
        self._done_s.clear()


@dataclass(frozen=True, slots=True)
class WriterParts:
    """What a writer works with. `stored` is told of each block that is in the store now, `lost` of those
    in use that are not, though they were thought to be.
    """

    store: BlockStore
    codec: BlockCodec
    breaker: Breaker
    ttl: TtlPolicy
    clock: Clock
    stored: Callable[[KvBlock], None]
    lost: Callable[[Sequence[KvBlock]], None]
    failed: Callable[[StoreFault], None]


class Writer:
    """`offer`, `touch`, `spoil`, `leave`, `forget` and `drop` from any thread; `close` once."""

    def __init__(self, parts: WriterParts, settings: WriterSettings) -> None:
        self._parts = parts
        self._settings = settings
        self._news = threading.Condition()
        self._queue: deque[tuple[KvBlock, Payload]] = deque()
        self._queued: set[BlockHash] = set()
        self._touches: dict[BlockHash, KvBlock] = {}
        self._spoiled: dict[BlockHash, KvBlock] = {}
        self._written = _Memory(settings.most_remembered, settings.written_s)
        self._touched = _Memory(settings.most_remembered, settings.touch_every_s)
        self._foreign = _Memory(settings.most_remembered, parts.ttl.first_s)
        self._num_queued = 0  # blocks ever taken in
        self._num_settled = 0  # of those: written or given up
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # by what `_num_settled` has to be
        self._is_busy = False
        self._is_closed = False
        self.num_bytes_queued = 0
        self._counts = WriteCounts()
        self._thread = threading.Thread(target=self._main, name="kv-writer", daemon=True)
        self._thread.start()

    def wants(self, block: KvBlock, num_bytes: int) -> bool:
        """Whether offering it would add anything: not known to be there, and room in the queue."""
        with self._news:
            return not self._knows(block, self._parts.clock.now()) and self._has_room(num_bytes)

    def offer(self, blocks: Sequence[tuple[KvBlock, Payload]]) -> None:
        """Queue these for the store, in this order, but for those known to be there."""
        now = self._parts.clock.now()
        with self._news:
            for block, payload in blocks:
                if self._knows(block, now):
                    continue
                if not self._has_room(len(payload)):
                    self._counts.num_dropped += 1
                    continue
                self._queue.append((block, payload))
                self._queued.add(block.hash)
                self._num_queued += 1
                self.num_bytes_queued += len(payload)
            self._news.notify_all()

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this once all that is queued now is in the store, or the store fails, or at the end.

        On this thread or the writer's; it must neither block nor raise.
        """
        with self._news:
            is_waiting = self._num_settled < self._num_queued and not self._is_closed
            is_waiting = is_waiting and self._parts.breaker.is_closed
            if is_waiting:
                self._waiting.append((self._num_queued, call))
        if not is_waiting:
            call()

    def touch(self, blocks: Sequence[KvBlock]) -> None:
        """These were used: let them live on in the store. Bounded; what is too much is left out."""
        now = self._parts.clock.now()
        with self._news:
            for block in blocks:
                is_settled = self._touched.holds(block.hash, now) or self._foreign.holds(block.hash, now)
                if len(self._touches) < _MOST_COMMANDS and not is_settled:
                    self._touched.add(block.hash, now)
                    self._touches[block.hash] = block
            if self._touches:
                self._news.notify_all()

    def spoil(self, block: KvBlock) -> None:
        """Delete what lies under this block's key: it is not the block."""
        with self._news:
            self._written.drop(block.hash)
            if len(self._spoiled) < _MOST_COMMANDS:
                self._spoiled[block.hash] = block
            self._news.notify_all()

    def leave(self, block: KvBlock) -> None:
        """What lies under this block's key was signed with a key that is not ours."""
        now = self._parts.clock.now()
        with self._news:
            self._foreign.add(block.hash, now)
            self._touches.pop(block.hash, None)

    def forget(self, blocks: Sequence[KvBlock]) -> None:
        """The store may not have these any more: write them again when they are offered."""
        with self._news:
            for block in blocks:
                self._written.drop(block.hash)
                self._touched.drop(block.hash)

    def drop(self, tenants: Collection[bytes]) -> None:
        """Give up what is queued of these tenants, each by what its scopes begin with."""
        with self._news:
            queue, self._queue = self._queue, deque()
            for block, payload in queue:
                if tenant_part_of(block.scope) in tenants:
                    self._settle(block, payload)
                else:
                    self._queue.append((block, payload))
            self._news.notify_all()

    def counts(self) -> WriteCounts:
        """The totals by now, as a copy."""
        with self._news:
            return replace(self._counts, failed=Counter(self._counts.failed))

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was offered is written, at most so long. Whether it is."""
        with self._news:
            return self._news.wait_for(lambda: not self._has_work and not self._is_busy, timeout_s)

    def close(self) -> None:
        """Drop what is queued and end the thread."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        self._thread.join(_CLOSE_S)

    def _knows(self, block: KvBlock, now: float) -> bool:
        return block.hash in self._queued or self._written.holds(block.hash, now)

    def _has_room(self, num_bytes: int) -> bool:
        return not self._is_closed and self.num_bytes_queued + num_bytes <= self._settings.most_bytes

    @property
    def _has_work(self) -> bool:
        return bool(self._queue or self._touches or self._spoiled)

    def _main(self) -> None:
        while self._wait():
            is_well = False
            try:
                self._work()
            except StoreFault as fault:
                self._fail(fault)
            except Exception as error:  # noqa: BLE001 - a fault of ours costs a write, not the thread
                self._fail(StoreFault(FaultKind.OTHER, f"{type(error).__name__}: {error}"))
            else:
                is_well = True
                with self._news:
                    if not self._parts.breaker.is_closed:
                        self._touched.clear()  # it was away: whatever is used next, look whether it is there
                    self._parts.breaker.succeed()
            with self._news:
                self._is_busy = False
                self._news.notify_all()
            self._call_waiting(all_of_them=not is_well)
        self._call_waiting(all_of_them=True)

    def _call_waiting(self, *, all_of_them: bool) -> None:
        with self._news:
            settled = self._num_settled
            due = [call for number, call in self._waiting if all_of_them or number <= settled]
            self._waiting = [] if all_of_them else [w for w in self._waiting if w[0] > settled]
        for call in due:
            call()

    def _wait(self) -> bool:
        """Until there is work and the breaker lets it out; False at the end."""
        breaker, clock = self._parts.breaker, self._parts.clock
        with self._news:
            while not self._is_closed:
                if not self._has_work:
                    self._news.wait()
                elif breaker.may_try(clock.now()):
                    self._is_busy = True
                    return True
                else:
                    self._news.wait(max((breaker.next_try_s or 0.0) - clock.now(), 0.0))
        return False

    def _work(self) -> None:
        """One call to the store. Raises StoreFault; what it was about is then given up."""
        with self._news:
            spoiled, self._spoiled = list(self._spoiled.values()), {}
            item = None
            touches: list[KvBlock] = []
            if not spoiled:
                if self._queue and len(self._touches) < _TOUCH_BATCH:
                    item = self._queue.popleft()
                else:
                    touches, self._touches = list(self._touches.values()), {}
        if spoiled:
            self._delete(spoiled)
        elif item is not None:
            self._put(*item)
        else:
            self._slide(touches)

    def _put(self, block: KvBlock, payload: Payload) -> None:
        parts = self._parts
        ttl_ms = parts.ttl.ttl_ms(block.index, block.hash)
        try:
            value = parts.codec.encode(block, payload)
            is_stored = parts.store.put(parts.codec.key(block), value, ttl_ms, self._settings.timeout_s)
        except Exception as error:
            with self._news:
                if isinstance(error, StoreFault) and error.kind in _POSTPONED:
                    self._queue.appendleft((block, payload))
                else:
                    self._settle(block, payload)
            raise
        with self._news:
            self._settle(block, payload)
            self._note_written(block, len(value) if is_stored else 0)
        parts.stored(block)

    def _settle(self, block: KvBlock, payload: Payload) -> None:
        self._queued.discard(block.hash)
        self._num_settled += 1
        self.num_bytes_queued -= len(payload)

    def _note_written(self, block: KvBlock, num_bytes: int) -> None:
        now = self._parts.clock.now()
        self._written.add(block.hash, now)
        if num_bytes:
            self._touched.add(block.hash, now)
            self._foreign.drop(block.hash)
            self._counts.num_stored += 1
            self._counts.num_bytes += num_bytes
        else:
            self._counts.num_existing += 1
            if not self._foreign.holds(block.hash, now):
                self._touches[block.hash] = block  # another's, and as old as it is

    def _slide(self, blocks: Sequence[KvBlock]) -> None:
        parts = self._parts
        ttls = [(parts.codec.key(block), parts.ttl.ttl_ms(block.index, block.hash)) for block in blocks]
        are_there = parts.store.touch(ttls, self._settings.timeout_s)
        lost = [block for block, is_there in zip(blocks, are_there, strict=True) if not is_there]
        with self._news:
            self._counts.num_touched += len(blocks) - len(lost)
        if lost:
            self.forget(lost)
            parts.lost(lost)

    def _delete(self, blocks: Sequence[KvBlock]) -> None:
        keys = [self._parts.codec.key(block) for block in blocks]
        num_deleted = self._parts.store.delete(keys, self._settings.timeout_s)
        with self._news:
            self._counts.num_deleted += num_deleted

    def _fail(self, fault: StoreFault) -> None:
        with self._news:
            self._counts.failed[fault.kind] += 1
            self._parts.breaker.fail(self._parts.clock.now(), fault.kind)
        self._parts.failed(fault)
