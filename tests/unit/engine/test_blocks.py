"""BlockManager: what is counted, shared and evicted, in which order."""

from __future__ import annotations

import pytest

from antiphon.engine.blocks import BlockManager, HashChanges


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def filled(manager: BlockManager, first: int, count: int) -> list[int]:
    """Allocate, register and release `count` blocks under the hashes first, first + 1 …"""
    evicted: list[int] = []
    blocks = manager.allocate(count, evicted)
    for offset, block in enumerate(blocks):
        manager.register(block, hash_of(first + offset))
    manager.release(blocks)
    return evicted


def test_prefix_is_found_up_to_the_first_hole() -> None:
    """A later block behind a missing one is of no use and is not returned."""
    manager = BlockManager(8)
    filled(manager, 0, 3)
    assert len(manager.find_prefix([hash_of(0), hash_of(1), hash_of(9), hash_of(2)])) == 2


def test_free_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    """Content is kept for as long as there is room that holds none."""
    manager = BlockManager(4)
    filled(manager, 0, 2)
    evicted: list[int] = []
    manager.allocate(2, evicted)
    assert evicted == []
    manager.allocate(1, evicted)
    assert len(evicted) == 1


def test_least_recently_released_goes_first_and_of_a_chain_its_leaf() -> None:
    """Two chains released in turn: the older one loses its blocks from the end."""
    manager = BlockManager(4)
    filled(manager, 0, 2)
    filled(manager, 10, 2)
    evicted: list[int] = []
    manager.allocate(1, evicted)
    assert len(manager.find_prefix([hash_of(0), hash_of(1)])) == 1
    assert len(manager.find_prefix([hash_of(10), hash_of(11)])) == 2


def test_acquiring_a_cached_block_protects_it() -> None:
    """A block in use cannot be evicted, however old."""
    manager = BlockManager(2)
    filled(manager, 0, 1)
    manager.acquire(manager.find_prefix([hash_of(0)]))
    assert manager.num_available == 1
    with pytest.raises(ValueError, match="available"):
        manager.allocate(2, [])


def test_a_hash_names_one_block_and_the_duplicate_is_freed() -> None:
    """Two sequences that computed the same block end up sharing the first one."""
    manager = BlockManager(4)
    first, second = manager.allocate(2, [])
    assert manager.register(first, hash_of(0)) == first
    assert manager.register(second, hash_of(0)) == first
    assert manager.num_used == 1
    manager.release([first])
    assert manager.num_used == 1, "the second user still holds it"
    manager.release([first])
    assert (manager.num_used, manager.num_cached) == (0, 1)
    manager.check()


def test_blocks_without_a_hash_become_free() -> None:
    """A partial block has no name, so nobody could find it again."""
    manager = BlockManager(2)
    manager.release(manager.allocate(2, []))
    assert manager.num_free == 2


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_manager_needs_blocks(num_blocks: int) -> None:
    """A size without sense is refused at once."""
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(num_blocks)


def test_check_notices_a_lost_block() -> None:
    """The recount is a real one: a block in no state is found."""
    manager = BlockManager(2)
    manager._free.pop()
    with pytest.raises(AssertionError, match="not all blocks"):
        manager.check()


def test_hashes_come_when_blocks_are_named_and_go_when_they_are_evicted() -> None:
    """Each is told once; releasing and reusing a block is no news."""
    manager = BlockManager(2)
    filled(manager, 0, 2)
    assert manager.take_changes() == HashChanges([hash_of(0), hash_of(1)], [])
    manager.refresh(manager.find_prefix([hash_of(0), hash_of(1)]))
    assert manager.take_changes() == HashChanges([], [])
    filled(manager, 10, 1)
    assert manager.take_changes() == HashChanges([hash_of(10)], [hash_of(1)])


def test_a_second_copy_that_goes_takes_no_hash_with_it() -> None:
    """Two sequences computed the same block: one copy goes, the block is still found, nothing is told."""
    manager = BlockManager(4)
    filled(manager, 0, 1)
    manager.take_changes()
    (twin,) = manager.allocate(1, [])
    holder = manager.register(twin, hash_of(0))
    assert holder != twin
    manager.release([holder])
    assert manager.take_changes() == HashChanges([], [])
    assert manager.find_prefix([hash_of(0)]) == [holder]


def test_what_came_and_went_unseen_is_not_told() -> None:
    """Between two questions a hash may come and go, or go and come back; the net is told."""
    manager = BlockManager(1)
    filled(manager, 0, 1)
    filled(manager, 1, 1)
    assert manager.take_changes() == HashChanges([hash_of(1)], [])
    filled(manager, 0, 1)
    filled(manager, 1, 1)
    assert manager.take_changes() == HashChanges([], [])


def test_changes_that_nobody_takes_are_bounded() -> None:
    """Past the bound it is said that they are lost; then it begins anew."""
    manager = BlockManager(8, most_changes=3)
    filled(manager, 0, 3)
    assert manager.take_changes() is not None
    filled(manager, 10, 4)
    assert manager.take_changes() is None
    assert set(manager.hashes()) == {hash_of(n) for n in (0, 1, 2, 10, 11, 12, 13)}
    filled(manager, 20, 1)
    assert manager.take_changes() == HashChanges([hash_of(20)], [])


def test_forgotten_owners_lose_what_nobody_uses() -> None:
    """Their cached blocks are free and found no more; those in use stay, and so do all of others."""
    manager = BlockManager(8)
    blocks = manager.allocate(5, [])
    for number, (block, owner) in enumerate(zip(blocks, (b"a", b"a", b"b", b"", b"a"), strict=True)):
        manager.register(block, hash_of(number), owner)
    manager.release(blocks[:4])
    manager.take_changes()
    assert manager.forget({b"a", b"nobody"}) == blocks[1::-1]
    manager.check()
    assert (manager.num_free, manager.num_cached, manager.num_used) == (5, 2, 1)
    found = [bool(manager.find_prefix([hash_of(number)])) for number in range(5)]
    assert found == [False, False, True, True, True]
    assert manager.take_changes() == HashChanges([], [hash_of(1), hash_of(0)])
    manager.release(blocks[4:])
    assert manager.forget({b"a"}) == [blocks[4]]
    assert manager.forget({b"a"}) == []


def test_a_name_given_anew_has_its_new_owner() -> None:
    """A block that was evicted and filled by another owner is not the first one's any more."""
    manager = BlockManager(1)
    for owner in (b"a", b"b"):
        blocks = manager.allocate(1, [])
        manager.register(blocks[0], hash_of(ord(owner)), owner)
        manager.release(blocks)
    assert manager.forget({b"a"}) == []
    assert manager.forget({b"b"}) == [0]
