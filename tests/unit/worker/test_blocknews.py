"""What a gateway is told of a worker's blocks: snapshots in parts, changes without gaps, no backlog."""

from __future__ import annotations

import asyncio
import threading

import pytest

from antiphon.core.kvblock import Tier
from antiphon.core.wire import MAX_FRAME_BYTES, BlockChange, Blocks, encoder
from antiphon.kv.events import Change, Directory
from antiphon.worker import blocknews
from antiphon.worker.blocknews import BlockFeed, BlockNews

A, B, C = (bytes([letter]) * 32 for letter in b"abc")
KEY_A, KEY_B, KEY_C = A[:8], B[:8], C[:8]


def said(feed: BlockFeed) -> list[Blocks]:
    """All that a link would send now."""
    messages = []
    while (message := feed.take()) is not None:
        messages.append(message)
    return messages


def test_it_begins_with_a_snapshot_even_of_nothing() -> None:
    """A gateway must know that it has heard all there is."""
    directory = Directory()
    assert said(BlockFeed(directory)) == [Blocks(directory.life, 0, [], 0, is_last=True)]


def test_changes_follow_in_order_and_without_gaps() -> None:
    """Numbers go on from the snapshot's; nothing is told twice."""
    directory = Directory()
    directory.record(Change.STORED, Tier.HOST, [A])
    feed = BlockFeed(directory)
    (snapshot,) = said(feed)
    assert (snapshot.number, snapshot.changes) == (1, [BlockChange(Tier.HOST, True, KEY_A)])
    directory.record(Change.STORED, Tier.ENGINE, [B, C])
    directory.record(Change.REMOVED, Tier.HOST, [A])
    changes = [BlockChange(Tier.ENGINE, True, KEY_B + KEY_C), BlockChange(Tier.HOST, False, KEY_A)]
    assert said(feed) == [Blocks(directory.life, 3, changes)]
    assert said(feed) == []


def test_a_large_snapshot_comes_in_parts_and_what_happens_meanwhile_comes_after_them() -> None:
    """The parts are of one moment and numbered; the last one says so."""
    directory = Directory()
    directory.record(Change.STORED, Tier.ENGINE, [A, B, C])
    directory.record(Change.STORED, Tier.STORE, [A])
    feed = BlockFeed(directory, part_hashes=2)
    first = feed.take()
    assert first is not None and feed.is_due
    directory.record(Change.REMOVED, Tier.ENGINE, [A])
    second, third, change = said(feed)
    assert [m.part for m in (first, second, third)] == [0, 1, 2]
    assert [m.is_last for m in (first, second, third)] == [False, False, True]
    assert {m.number for m in (first, second, third)} == {2}
    keys = first.changes[0].keys + second.changes[0].keys
    assert {keys[at : at + 8] for at in range(0, len(keys), 8)} == {KEY_A, KEY_B, KEY_C}
    assert third.changes == [BlockChange(Tier.STORE, True, KEY_A)]
    assert change == Blocks(directory.life, 3, [BlockChange(Tier.ENGINE, False, KEY_A)])


def test_who_fell_behind_is_told_all_anew() -> None:
    """The ring has moved on: a snapshot instead of what was missed, and changes from there."""
    directory = Directory(most_hashes=2)
    feed = BlockFeed(directory)
    said(feed)
    for block_hash in (A, B, C):
        directory.record(Change.STORED, Tier.HOST, [block_hash])
    (snapshot,) = said(feed)
    assert (snapshot.number, snapshot.part, snapshot.is_last) == (3, 0, True)
    assert len(snapshot.changes[0].keys) == 24


def test_more_changes_than_a_message_holds_are_a_snapshot() -> None:
    """One message never grows past its bound, whatever happened since the last one."""
    directory = Directory()
    feed = BlockFeed(directory, part_hashes=2)
    said(feed)
    directory.record(Change.STORED, Tier.HOST, [A, B])
    directory.record(Change.STORED, Tier.HOST, [C])
    messages = said(feed)
    assert [m.part for m in messages] == [0, 1]
    assert all(sum(len(c.keys) for c in m.changes) <= 16 for m in messages)


def test_a_resync_ends_a_snapshot_and_begins_another() -> None:
    """What the gateway has of the first one is of no use to it."""
    directory = Directory()
    directory.record(Change.STORED, Tier.HOST, [A, B, C])
    feed = BlockFeed(directory, part_hashes=2)
    feed.take()
    feed.resync()
    assert feed.is_due
    assert [m.part for m in said(feed)] == [0, 1]


def test_a_part_is_small_against_a_frame() -> None:
    """Outputs of answers wait behind no more than this."""
    directory = Directory()
    directory.record(
        Change.STORED,
        Tier.HOST,
        [number.to_bytes(32, "little") for number in range(3 * blocknews.PART_HASHES)],
    )
    sizes = [len(encoder.encode(message)) for message in said(BlockFeed(directory))]
    assert len(sizes) == 3
    assert max(sizes) < MAX_FRAME_BYTES / 64


async def test_changes_of_other_threads_are_told_on_the_loop_and_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many changes within the period are one call; a change after it is another one."""
    monkeypatch.setattr(blocknews, "PERIOD_S", 0.01)
    directory = Directory()
    told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    BlockNews(directory, lambda: told.put_nowait((threading.get_ident(), directory.snapshot().number)))

    def change() -> None:
        for block_hash in (A, B, C):
            directory.record(Change.STORED, Tier.HOST, [block_hash])

    async with asyncio.timeout(5):
        await asyncio.to_thread(change)
        thread, number = await told.get()
        assert thread == threading.get_ident()
        while number < 3:  # where the thread was slower than the period
            _, number = await told.get()
        directory.record(Change.REMOVED, Tier.HOST, [A])
        assert (await told.get())[1] == 4
    assert told.empty()


def test_a_change_after_the_loop_is_gone_is_nobodys_fault() -> None:
    """The engine thread may outlive the loop by a moment."""
    directory = Directory()

    async def begin() -> None:
        BlockNews(directory, lambda: None)

    asyncio.run(begin())
    directory.record(Change.STORED, Tier.HOST, [A])
    assert directory.snapshot().number == 1
