"""The shared store as one worker uses it: fetcher and writer, and what they tell each other.

A block the store turned out not to have may be written again, and if it is in use the engine is told; a
value that is not what its key promises is deleted, or left alone where a key we do not know signed it;
what was fetched goes to the host tier; what the store has and lacks is told to the directory; faults are
counted by those who met them and told to the operator by the alarm. Reads and writes have a breaker each.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from antiphon.core.blockhash import BlockHash
from antiphon.core.clock import Clock
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.kv.alarm import Alarm
from antiphon.kv.breaker import Breaker, BreakerSettings
from antiphon.kv.codec import BadValueReason, BlockCodec
from antiphon.kv.events import Change, Directory
from antiphon.kv.fetcher import Fetcher, FetcherParts, FetchSettings
from antiphon.kv.gate import Gate
from antiphon.kv.hosttier import HostTier, Payload
from antiphon.kv.stats import StoreStats
from antiphon.kv.store import BlockStore, StoreFault
from antiphon.kv.ttl import TtlPolicy
from antiphon.kv.writer import Writer, WriterParts, WriterSettings

# Reads must be noticed to work again within 2 s, even where the store had refused them.
_READS = BreakerSettings(max_retry_s=0.5)
_WRITES = BreakerSettings()
_MOST_LOST = 65536  # hashes that wait to be taken; beyond it blocks are computed again, not written again


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """What the remote side works with. `lock` guards the gate."""

    store: BlockStore
    codec: BlockCodec
    gate: Gate
    lock: threading.Lock
    host: HostTier
    directory: Directory
    alarm: Alarm
    clock: Clock


class Remote:
    """Owns the threads of fetcher and writer, and the store."""

    def __init__(
        self, parts: RemoteParts, fetch: FetchSettings, write: WriterSettings, ttl: TtlPolicy
    ) -> None:
        self._parts = parts
        self._bad_values: Counter[BadValueReason] = Counter()
        self._lost: set[BlockHash] = set()
        self._news_lock = threading.Lock()  # of both
        self._is_closing = False
        jitter = random.random
        self._reads, self._writes = Breaker(_READS, jitter), Breaker(_WRITES, jitter)
        self.writer = Writer(
            WriterParts(
                parts.store,
                parts.codec,
                self._writes,
                ttl,
                parts.clock,
                self._stored,
                self._note_lost,
                self.failed,
            ),
            write,
        )
        self.fetcher = Fetcher(
            FetcherParts(parts.store, parts.codec, parts.gate, self._reads, parts.clock, parts.lock),
            self,
            fetch,
        )

    def close(self) -> None:
        """End the threads and the store's connections."""
        self._is_closing = True
        self._parts.store.close()
        self.fetcher.close()
        self.writer.close()

    @property
    def is_in_use(self) -> bool:
        """Whether the store is both read and written."""
        return self._reads.is_closed and self._writes.is_closed

    def landed(self, blocks: Sequence[tuple[KvBlock, Payload]]) -> None:
        self._parts.host.put(blocks)
        self._parts.directory.record(Change.STORED, Tier.STORE, [block.hash for block, _ in blocks])

    def missed(self, blocks: Sequence[KvBlock]) -> None:
        self.writer.forget(blocks)
        self._parts.directory.record(Change.REMOVED, Tier.STORE, [blocks[0].hash])  # more is not known

    def spoiled(self, block: KvBlock, reason: BadValueReason) -> None:
        with self._news_lock:
            self._bad_values[reason] += 1
        if reason is BadValueReason.KEY:
            self.writer.leave(block)
        else:
            self.writer.spoil(block)
        self._parts.alarm.ring("bad_value", f"{reason.value} of {self._parts.codec.key(block)}")

    def failed(self, fault: StoreFault) -> None:
        if not self._is_closing:  # calls that we end ourselves are no news
            self._parts.alarm.ring(fault.kind.value, fault.detail)

    def _stored(self, block: KvBlock) -> None:
        self._parts.directory.record(Change.STORED, Tier.STORE, [block.hash])

    def _note_lost(self, blocks: Sequence[KvBlock]) -> None:
        hashes = [block.hash for block in blocks]
        self._parts.directory.record(Change.REMOVED, Tier.STORE, hashes)
        with self._news_lock:
            if len(self._lost) < _MOST_LOST:
                self._lost.update(hashes)

    def take_lost(self) -> Collection[BlockHash]:
        """Blocks in use that turned out to be gone from the store since the last call."""
        with self._news_lock:
            lost, self._lost = self._lost, set()
        return lost

    def stats(self) -> StoreStats:
        """How it stands."""
        read, written = self.fetcher.counts(), self.writer.counts()
        with self._news_lock:
            bad_values = dict(self._bad_values)
        return StoreStats(
            num_asked=read.num_asked,
            num_got=read.num_got,
            got_bytes=read.num_bytes,
            get_s=read.seconds,
            num_probes=read.num_probes,
            read_faults=read.faults,
            bad_values=bad_values,
            num_stored=written.num_stored,
            num_existing=written.num_existing,
            num_dropped=written.num_dropped,
            num_touched=written.num_touched,
            num_deleted=written.num_deleted,
            stored_bytes=written.num_bytes,
            write_faults=written.failed,
            read_breaker=self._reads.state,
            write_breaker=self._writes.state,
            num_opened=self._reads.num_opened + self._writes.num_opened,
            queued_bytes=self.writer.num_bytes_queued,
            fetching_bytes=self.fetcher.num_bytes_under_way,
            rates=self._parts.gate.rates,
        )
