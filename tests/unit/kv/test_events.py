"""The directory: numbers without gaps, a ring that says when it has moved on, snapshots."""

from __future__ import annotations

from antiphon.core.kvblock import Tier
from antiphon.kv.events import Change, Directory, DirectoryEvent, Snapshot

A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def test_events_are_numbered_from_one() -> None:
    """In the order in which they were recorded."""
    directory = Directory()
    directory.record(Change.STORED, Tier.HOST, [A, B])
    directory.record(Change.REMOVED, Tier.HOST, [A])
    assert directory.after(0) == [
        DirectoryEvent(1, Change.STORED, Tier.HOST, (A, B)),
        DirectoryEvent(2, Change.REMOVED, Tier.HOST, (A,)),
    ]
    assert directory.after(1) == [DirectoryEvent(2, Change.REMOVED, Tier.HOST, (A,))]
    assert directory.after(2) == []


def test_nothing_is_no_event() -> None:
    """No hashes, no number."""
    directory = Directory()
    directory.record(Change.STORED, Tier.HOST, [])
    assert directory.after(0) == []


def test_a_reader_that_fell_behind_is_told() -> None:
    """The ring keeps the last ones; who missed more takes a snapshot."""
    directory = Directory(most_events=2)
    for block_hash in (A, B, C):
        directory.record(Change.STORED, Tier.HOST, [block_hash])
    assert directory.after(0) is None
    events = directory.after(1)
    assert events is not None
    assert [event.number for event in events] == [2, 3]


def test_a_number_from_another_life_is_told() -> None:
    """A worker that started anew counts from one: a reader ahead of it has to begin again."""
    assert Directory().after(7) is None


def test_a_snapshot_holds_what_events_add_up_to() -> None:
    """By local tier, with the number to go on from."""
    directory = Directory()
    directory.record(Change.STORED, Tier.HOST, [A, B])
    directory.record(Change.STORED, Tier.ENGINE, [C])
    directory.record(Change.REMOVED, Tier.HOST, [A])
    held = {Tier.HOST: frozenset({B}), Tier.ENGINE: frozenset({C})}
    assert directory.snapshot() == Snapshot(3, held)


def test_the_store_is_told_and_not_remembered() -> None:
    """Nobody knows what the store still has, and a set of all that ever was would grow for ever."""
    directory = Directory()
    directory.record(Change.STORED, Tier.STORE, [A])
    assert directory.after(0) == [DirectoryEvent(1, Change.STORED, Tier.STORE, (A,))]
    assert all(not held for held in directory.snapshot().hashes.values())
