"""What gateways are told of this worker's blocks: the directory's changes, or all of it, link by link.

Owns how far each gateway was told. Invariants: nothing here waits, and nothing grows with how slowly a
gateway reads: a feed is a number, and while a snapshot is being said the hashes of that moment; who fell
behind is told all anew instead of what was missed. One message is far below MAX_FRAME_BYTES, so that
outputs of answers come between the parts of a long snapshot.

Decides what is said, not when a link writes: worker/links.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks, pack_keys
from antiphon.kv.events import Change, Directory, DirectoryEvent, Snapshot

PERIOD_S = 0.05  # changes are said at most this often
PART_HASHES = 8192  # 64 KiB on the wire, about 1 ms of work here and 2 ms at the gateway


class BlockFeed:
    """What one gateway has been told. Begins with a snapshot. Not thread-safe."""

    def __init__(self, directory: Directory, part_hashes: int = PART_HASHES) -> None:
        self.is_due = True  # `take` may have something
        self._directory = directory
        self._part_hashes = part_hashes
        self._number: int | None = None  # of the last change told; None: a snapshot is to begin
        self._parts: Iterator[Blocks] = iter(())

    def resync(self) -> None:
        """The gateway missed something: begin with a snapshot again."""
        self._number = None
        self._parts = iter(())
        self.is_due = True

    def take(self) -> Blocks | None:
        """What to say next, None where all is said. `is_due` stays set only where more follows at once."""
        message = next(self._parts, None)
        if message is None:
            events = self._news()
            if events is None:
                message = self._begin_snapshot()
            elif events:
                message = self._changes(events)
        self.is_due = message is not None and message.part is not None and not message.is_last
        return message

    def _news(self) -> list[DirectoryEvent] | None:
        """What happened since the last message. None: it is too long ago, or too much; tell all."""
        events = None if self._number is None else self._directory.after(self._number)
        if events is None or sum(len(event.hashes) for event in events) > self._part_hashes:
            return None
        return events

    def _changes(self, events: Sequence[DirectoryEvent]) -> Blocks:
        self._number = events[-1].number
        changes = [
            BlockChange(event.tier, event.change is Change.STORED, pack_keys(event.hashes))
            for event in events
        ]
        return Blocks(self._directory.life, self._number, changes)

    def _begin_snapshot(self) -> Blocks:
        snapshot = self._directory.snapshot()
        self._number = snapshot.number
        self._parts = self._parts_of(snapshot)
        return next(self._parts)

    def _parts_of(self, snapshot: Snapshot) -> Iterator[Blocks]:
        """Made as they are said: hashing out a large tier at once would hold up the loop."""
        pieces = [
            (tier, piece) for tier, held in snapshot.hashes.items() for piece in self._pieces(tier, held)
        ]
        life, last = self._directory.life, max(0, len(pieces) - 1)
        if not pieces:
            yield Blocks(life, snapshot.number, [], 0, is_last=True)
        for part, (tier, hashes) in enumerate(pieces):
            change = BlockChange(tier, True, pack_keys(hashes))
            yield Blocks(life, snapshot.number, [change], part, is_last=part == last)

    def _pieces(self, tier: Tier, held: Iterable[BlockHash]) -> Iterator[Sequence[BlockHash]]:
        hashes = list(held)
        for start in range(0, len(hashes), self._part_hashes):
            yield hashes[start : start + self._part_hashes]


class BlockNews:
    """Calls `tell` on the loop when the directory has changed, at most every `PERIOD_S`."""

    def __init__(self, directory: Directory, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._is_known = False  # that there is something: `tell` will be called
        directory.listen(self._changed)

    def _changed(self) -> None:
        """On any thread."""
        if self._is_known:
            return
        self._is_known = True
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, PERIOD_S, self._tell_now)
        except RuntimeError:
            return  # the loop is closed: nobody is left to be told

    def _tell_now(self) -> None:
        self._is_known = False  # first: what changes from here on calls again
        self._tell()
