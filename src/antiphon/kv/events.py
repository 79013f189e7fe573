"""What a worker tells about the blocks it holds: numbered changes, so that a reader notices gaps.

Owns the worker's side of the block directory: the set of hashes in each local tier, a ring of the last
changes, and their numbers, which mean something only within one `life` of the worker. A reader asks for
what came after number N; where the ring has moved on it takes a snapshot and goes on from there. Only a
hint to the router: late or lost is slower, not wrong.

A tier names a hash at most once (engine/blocks.py, hosttier.py), so the tiers that hold it are the count
of its copies: it is gone from the worker when the last of them let go. What lies in the shared store is
hearsay, nobody knows what it still has: the last `most_stored` hashes that went there or came from there
are remembered for snapshots.

Thread-safe; every call is short. Does not know who reads or how it travels.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import Tier

_MOST_HASHES = 65536
_MOST_STORED = 65536


class Change(enum.StrEnum):
    """What happened to blocks in a tier."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class DirectoryEvent:
    """`number` counts from 1 without gaps within one life of a worker."""

    number: int
    change: Change
    tier: Tier
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What each tier holds after event `number`; of the store, what was heard of lately."""

    number: int
    hashes: dict[Tier, frozenset[BlockHash]]


class Directory:
    """The changes of one worker's tiers. The ring holds at most `most_hashes` hashes, or one event."""

    def __init__(self, most_hashes: int = _MOST_HASHES, most_stored: int = _MOST_STORED) -> None:
        self.life = secrets.randbits(63) | 1  # never 0: that is a worker that tells nothing
        self._lock = threading.Lock()
        self._most_hashes = most_hashes
        self._most_stored = most_stored
        self._events: deque[DirectoryEvent] = deque()
        self._num_hashes = 0  # in the ring
        self._number = 0
        self._held: dict[Tier, set[BlockHash]] = {Tier.ENGINE: set(), Tier.HOST: set()}
        self._stored: dict[BlockHash, None] = {}  # heard of last comes last
        self._listener: Callable[[], None] = lambda: None

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called after each change, on the thread that made it. It must be quick."""
        self._listener = listener

    def record(self, change: Change, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Note a change. Nothing is noted where there are no hashes."""
        if not hashes:
            return
        with self._lock:
            self._append(change, tier, hashes)
        self._listener()

    def replace(self, tier: Tier, hashes: Collection[BlockHash]) -> None:
        """This local tier holds exactly these now: for one that lost count of its changes."""
        with self._lock:
            held = self._held[tier]
            removed, stored = held.difference(hashes), set(hashes).difference(held)
            for change, some in ((Change.REMOVED, removed), (Change.STORED, stored)):
                if some:
                    self._append(change, tier, tuple(some))
        if removed or stored:
            self._listener()

    def after(self, number: int) -> list[DirectoryEvent] | None:
        """The events after this one, oldest first. None where some are gone: take a snapshot."""
        with self._lock:
            num_missed = self._number - number
            if not 0 <= num_missed <= len(self._events):
                return None
            return [self._events[index - num_missed] for index in range(num_missed)]

    def snapshot(self) -> Snapshot:
        """What is held now, and the number to go on from."""
        with self._lock:
            hashes = {tier: frozenset(held) for tier, held in self._held.items()}
            return Snapshot(self._number, hashes | {Tier.STORE: frozenset(self._stored)})

    def _append(self, change: Change, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self._number += 1
        self._events.append(DirectoryEvent(self._number, change, tier, tuple(hashes)))
        self._num_hashes += len(hashes)
        while self._num_hashes > self._most_hashes and len(self._events) > 1:
            self._num_hashes -= len(self._events.popleft().hashes)
        if tier is Tier.STORE:
            self._note_stored(change, hashes)
        elif change is Change.STORED:
            self._held[tier].update(hashes)
        else:
            self._held[tier].difference_update(hashes)

    def _note_stored(self, change: Change, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self._stored.pop(block_hash, None)
            if change is Change.STORED:
                self._stored[block_hash] = None
        if len(self._stored) > self._most_stored:
            # A quarter at a time: the first key of a dict is slow to find where many before it went.
            kept = list(self._stored)[-(self._most_stored - self._most_stored // 4) :]
            self._stored = dict.fromkeys(kept)
