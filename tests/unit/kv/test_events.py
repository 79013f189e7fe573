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
    directory = Directory(most_hashes=2)
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
    held = {Tier.HOST: frozenset({B}), Tier.ENGINE: frozenset({C}), Tier.STORE: frozenset()}
    assert directory.snapshot() == Snapshot(3, held)


def test_of_the_store_the_last_hearsay_is_remembered() -> None:
    """What went to the store lately, less what it was seen to lack; nobody knows what it still has."""
    directory = Directory(most_stored=2)
    directory.record(Change.STORED, Tier.STORE, [A])
    assert directory.after(0) == [DirectoryEvent(1, Change.STORED, Tier.STORE, (A,))]
    directory.record(Change.STORED, Tier.STORE, [B])
    directory.record(Change.STORED, Tier.STORE, [A])
    directory.record(Change.STORED, Tier.STORE, [C])
    assert directory.snapshot().hashes[Tier.STORE] == {A, C}
    directory.record(Change.REMOVED, Tier.STORE, [A, B])
    assert directory.snapshot().hashes[Tier.STORE] == {C}


def test_the_ring_is_bounded_in_hashes_not_in_events() -> None:
    """Events of many blocks push out more; the last one always stays."""
    directory = Directory(most_hashes=3)
    directory.record(Change.STORED, Tier.HOST, [A])
    directory.record(Change.STORED, Tier.HOST, [B, C])
    assert directory.after(0) is not None
    directory.record(Change.REMOVED, Tier.HOST, [A, B, C])
    assert directory.after(1) is None
    assert directory.after(2) is not None
    directory.record(Change.STORED, Tier.HOST, [bytes([i]) * 32 for i in range(9)])
    assert directory.after(3) is not None


def test_a_tier_that_lost_count_says_what_it_holds() -> None:
    """Only the difference is news; where there is none, nothing is said."""
    directory = Directory()
    directory.record(Change.STORED, Tier.ENGINE, [A, B])
    directory.record(Change.STORED, Tier.HOST, [A])
    directory.replace(Tier.ENGINE, [B, C])
    assert directory.after(2) == [
        DirectoryEvent(3, Change.REMOVED, Tier.ENGINE, (A,)),
        DirectoryEvent(4, Change.STORED, Tier.ENGINE, (C,)),
    ]
    directory.replace(Tier.ENGINE, [C, B])
    assert directory.after(4) == []
    assert directory.snapshot().hashes[Tier.HOST] == {A}


def test_a_listener_is_called_after_each_change_and_for_nothing_else() -> None:
    """It finds the change it is called for."""
    directory = Directory()
    numbers: list[int] = []
    directory.listen(lambda: numbers.append(directory.snapshot().number))
    directory.record(Change.STORED, Tier.ENGINE, [A])
    directory.record(Change.STORED, Tier.ENGINE, [])
    directory.replace(Tier.ENGINE, [A])
    directory.replace(Tier.ENGINE, [B])
    assert numbers == [1, 3]


def test_every_directory_lives_a_life_of_its_own() -> None:
    """A worker that starts anew is not mistaken for the one before; 0 is never a life."""
    assert len({Directory().life for _ in range(9)} - {0}) == 9
