"""What a worker tells about the blocks it holds: numbered changes, so that a reader notices gaps.

Owns the worker's side of the block directory: the set of hashes in each local tier, a ring of the last
changes, and their numbers. A reader asks for what came after number N; where the ring has moved on
it takes a snapshot and goes on from there. Only a hint to the router: late or lost is slower, not wrong.
What went to the shared store is told as an event only: nobody knows what the store still has.

Thread-safe; every call is short. Does not know who reads or how it travels.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import Tier

_MOST_EVENTS = 4096


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
    """What each local tier holds after event `number`."""

    number: int
    hashes: dict[Tier, frozenset[BlockHash]]


class Directory:
    """The changes of one worker's tiers."""

    def __init__(self, most_events: int = _MOST_EVENTS) -> None:
        self._lock = threading.Lock()
        self._events: deque[DirectoryEvent] = deque(maxlen=most_events)
        self._number = 0
        self._held: dict[Tier, set[BlockHash]] = {Tier.ENGINE: set(), Tier.HOST: set()}

    def record(self, change: Change, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Note a change. Nothing is noted where there are no hashes."""
        if not hashes:
            return
        with self._lock:
            self._number += 1
            self._events.append(DirectoryEvent(self._number, change, tier, tuple(hashes)))
            if tier in self._held:
                held = self._held[tier]
                held.update(hashes) if change is Change.STORED else held.difference_update(hashes)

    def after(self, number: int) -> list[DirectoryEvent] | None:
        """The events after this one, oldest first. None where some are gone: take a snapshot."""
        with self._lock:
            num_missed = self._number - number
            if not 0 <= num_missed <= len(self._events):
                return None
            return list(self._events)[len(self._events) - num_missed :]

    def snapshot(self) -> Snapshot:
        """What is held now, and the number to go on from."""
        with self._lock:
            return Snapshot(self._number, {tier: frozenset(held) for tier, held in self._held.items()})
