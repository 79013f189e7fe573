"""Where blocks lie, as far as workers told this gateway: in which replicas, and probably in the store.

Owns what was told: blocks by replica, the number up to which each replica's news are complete, hints about
the store. Only a hint to the router: wrong, late or empty is slower, never wrong. Invariants: what a
replica told in full is what is here (tests/property); a replica that left is found no more from
that moment; at most `most_blocks` blocks of replicas and `most_stored` of the store are remembered: past
that the largest replica loses those it told first, and `num_dropped` says so.

News are numbered within a life of the worker. A gap leaves what is known as it is and asks for a snapshot,
not more often than every `RESYNC_AGAIN_S`; what is late, doubled, or of another life changes nothing.

To ask: `look_up` walks the chain of a prompt once and returns a `Lookup`::

    lookup = directory.look_up(PromptKeys(generation, namespace, block_tokens), now)
    lookup.holders(most, draw)   replicas with the longest leading runs, best first: [(replica, blocks)]
    lookup.local(replica)        leading blocks that this one holds, in its engine or its host tier
    lookup.in_store(start)       how many blocks from there on the store can add

A gap ends a run: what a replica holds behind a block that it lacks is of no use to it (neither its engine
nor its host tier would take it up), until the store supplies what is missing; that case is not counted.

Pure: no clock, no links. Knows replicas by the numbers that its owner gives them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks, unpack_keys
from antiphon.router.holders import HolderTable, KeyChain
from antiphon.router.lookup import Lookup
from antiphon.router.storehints import StoreHints

RESYNC_AGAIN_S = 5.0
MOST_BLOCKS = 4_000_000
MOST_STORED = 2_000_000
STORE_KEEP_S = 1800.0  # half of what a block lives in the store without a use
_TIDY_BLOCKS = 2000  # a slice of work that no stream notices
_SHARE_DROPPED = 8  # of the largest replica's blocks one in so many goes where there is no room


@dataclass(slots=True)
class _Snapshot:
    """One that is coming in. `held` may be the replica's own, where that was empty."""

    number: int
    held: dict[int, int]
    next_part: int = 0


@dataclass(slots=True, eq=False)
class _Replica:
    replica: int
    slot: int
    life: int
    heard_s: float
    held: dict[int, int] = field(default_factory=dict)  # key → the local tiers that hold it, as bits
    number: int | None = None  # of the last change that is in `held`; None: before the first snapshot
    newest: int = 0  # highest number heard of
    snapshot: _Snapshot | None = None
    asked_s: float | None = None  # since when a snapshot is waited for

    @property
    def is_complete(self) -> bool:
        return self.number is not None and self.number >= self.newest


@dataclass(slots=True)
class DirectoryCounts:
    """What has happened so far."""

    num_gaps: int = 0
    num_resyncs: int = 0
    num_ignored: int = 0  # messages that were late, doubled, or of another life
    num_dropped: int = 0  # blocks, for want of room


class BlockDirectory:
    """Blocks of all replicas that one gateway knows."""

    def __init__(
        self,
        most_blocks: int = MOST_BLOCKS,
        most_stored: int = MOST_STORED,
        store_keep_s: float = STORE_KEEP_S,
    ) -> None:
        self.counts = DirectoryCounts()
        self.num_blocks = 0  # a block that two replicas hold counts twice
        self._most_blocks = most_blocks
        self._slots = count()
        self._replicas: dict[int, _Replica] = {}
        self._by_slot: dict[int, _Replica] = {}
        self._gone: deque[tuple[int, Iterator[int]]] = deque()  # slots, and keys to be cleaned up
        self._table = HolderTable()
        self._hints = StoreHints(most_stored, store_keep_s)

    @property
    def num_stored(self) -> int:
        """Blocks that the store is believed to have."""
        return len(self._hints)

    def join(self, replica: int, life: int, now: float) -> None:
        """A worker is there, in this life; nothing is known of its blocks. What was known goes."""
        self.leave(replica)
        joined = _Replica(replica, next(self._slots), life, now)
        self._replicas[replica] = self._by_slot[joined.slot] = joined

    def leave(self, replica: int) -> None:
        """It is gone, and found no more. Cleaning up is left to `tidy`."""
        gone = self._replicas.pop(replica, None)
        if gone is not None:
            del self._by_slot[gone.slot]
            self._gone.append((gone.slot, iter(gone.held)))

    def tidy(self, most_blocks: int = _TIDY_BLOCKS) -> bool:
        """Clean up after replicas that left, a slice at a time. Whether there is more to do."""
        while self._gone and most_blocks > 0:
            slot, keys = self._gone[0]
            some = list(islice(keys, most_blocks))
            self._table.remove(slot, some)
            self.num_blocks -= len(some)
            if len(some) < most_blocks:
                self._gone.popleft()
            most_blocks -= len(some)
        return bool(self._gone)

    def num_blocks_of(self, replica: int) -> int:
        """Blocks that it holds, as far as is known."""
        known = self._replicas.get(replica)
        return 0 if known is None else len(known.held)

    def heard_s(self, replica: int) -> float | None:
        """When it last told of its blocks, or joined. None: it is not here."""
        known = self._replicas.get(replica)
        return None if known is None else known.heard_s

    def is_complete(self, replica: int) -> bool:
        """Whether nothing that it told of its blocks is missing here."""
        known = self._replicas.get(replica)
        return known is not None and known.is_complete

    def take(self, replica: int, news: Blocks, now: float) -> bool:
        """What a worker says of its blocks. True: ask it for a snapshot."""
        known = self._replicas.get(replica)
        if known is None or news.life != known.life:
            self.counts.num_ignored += 1
            return False
        known.heard_s = now
        was_complete = known.is_complete
        known.newest = max(known.newest, news.number)
        if known.number is not None and news.number <= known.number:
            self.counts.num_ignored += 1
            return False
        has_gap = not (self._follow(known, news, now) if news.part is None else self._build(known, news, now))
        self._shed()
        if has_gap and was_complete:
            self.counts.num_gaps += 1
        return has_gap and self._may_ask(known, now)

    def look_up(self, chain: KeyChain, now: float) -> Lookup:
        """What is known of these blocks at this moment. Use it before anything else is taken in."""
        self._hints.age(now)
        walk = self._table.walk(chain)
        return Lookup(chain, walk, self._replicas, self._by_slot, self._hints, now)

    def _follow(self, known: _Replica, news: Blocks, now: float) -> bool:
        """Take in changes that go on from what is known. False: some are missing in between."""
        num_missing = None if known.number is None else news.number - len(news.changes) - known.number
        if num_missing is None or num_missing > 0:
            return False
        known.snapshot = None  # its end would undo these
        for change in news.changes[-num_missing:]:
            if change.is_stored:
                self._store(known, change, known.held, now)
            else:
                self._remove(known, change)
        known.number = news.number
        return True

    def _build(self, known: _Replica, news: Blocks, now: float) -> bool:
        """Take in a part of a snapshot. False: one before it is missing."""
        snapshot = known.snapshot
        if news.part == 0:
            snapshot = known.snapshot = _Snapshot(news.number, {} if known.held else known.held)
        elif snapshot is None or (snapshot.number, snapshot.next_part) != (news.number, news.part):
            known.snapshot = None
            return False
        for change in news.changes:
            self._store(known, change, snapshot.held, now)
        snapshot.next_part += 1
        if news.is_last:
            self._finish(known, snapshot)
        return True

    def _finish(self, known: _Replica, snapshot: _Snapshot) -> None:
        """All that is held was told: what was not is held no longer."""
        held, told = known.held, snapshot.held
        if told is not held:
            self._drop(known, [key for key in held if key not in told])
            held.update((key, tiers) for key, tiers in told.items() if key in held)
        known.number = snapshot.number
        known.snapshot = None
        known.asked_s = None

    def _store(self, known: _Replica, change: BlockChange, told: dict[int, int], now: float) -> None:
        """A tier has these. What is told in a snapshot is noted in `told` too."""
        keys = unpack_keys(change.keys)
        if change.tier is Tier.STORE:
            self._hints.add(keys, now)
            return
        held, tier = known.held, 1 << change.tier
        new = []
        for key in keys:
            tiers = held.get(key, 0)
            held[key] = tiers | tier
            if not tiers:
                new.append(key)
        if told is not held:
            for key in keys:
                told[key] = told.get(key, 0) | tier
        self._table.add(known.slot, new)
        self.num_blocks += len(new)

    def _remove(self, known: _Replica, change: BlockChange) -> None:
        """A tier has these no longer; they are gone when no other tier of the replica has them."""
        keys = unpack_keys(change.keys)
        if change.tier is Tier.STORE:
            self._hints.discard(keys)
            return
        held, others = known.held, ~(1 << change.tier)
        gone = []
        for key in keys:
            tiers = held.get(key, 0)
            if tiers & others:
                held[key] = tiers & others
            elif tiers:
                gone.append(key)
        self._drop(known, dict.fromkeys(gone))

    def _drop(self, known: _Replica, keys: Collection[int]) -> None:
        for key in keys:
            del known.held[key]
        self._table.remove(known.slot, keys)
        self.num_blocks -= len(keys)

    def _shed(self) -> None:
        """Keep the bound."""
        while self.num_blocks > self._most_blocks:
            if self._gone:
                self.tidy()
                continue
            largest = max(self._replicas.values(), key=lambda known: len(known.held))
            oldest = list(islice(largest.held, 1 + len(largest.held) // _SHARE_DROPPED))
            self._drop(largest, oldest)
            self.counts.num_dropped += len(oldest)

    def _may_ask(self, known: _Replica, now: float) -> bool:
        if known.asked_s is not None and now - known.asked_s < RESYNC_AGAIN_S:
            return False
        known.asked_s = now
        self.counts.num_resyncs += 1
        return True
