"""Walks along chains of blocks, against looking at every block of every holder."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.core.kvblock import Tier
from antiphon.router.holders import HolderTable
from support.toldblocks import Chain, Told

LENGTH = 400  # blocks: several strides
NUM_SLOTS = 5
blocks = st.integers(0, LENGTH)
spans = st.tuples(blocks, blocks).map(sorted).map(lambda ends: range(*ends))
slots = st.integers(0, NUM_SLOTS - 1)
changes = st.lists(st.tuples(slots, st.booleans(), spans), max_size=12)


def leading(held: set[int] | dict[int, int], chain: list[int]) -> int:
    """How many of the first blocks are held, one by one."""
    return next((block for block, key in enumerate(chain) if key not in held), len(chain))


@given(changes=changes, length=blocks)
def test_a_walk_finds_what_looking_at_every_block_finds(
    changes: list[tuple[int, bool, range]], length: int
) -> None:
    """Runs come and go anywhere, in the middle too: who holds each block, how far each slot leads."""
    table, held = HolderTable(), [dict[int, int]() for _ in range(NUM_SLOTS)]
    chain = Chain(range(length))
    keys = Chain(range(LENGTH)).upto(LENGTH)
    for slot, is_stored, span in changes:
        some = [keys[n] for n in span if (keys[n] not in held[slot]) == is_stored]
        if is_stored:
            table.add(slot, some)
            held[slot] |= dict.fromkeys(some, 1)
        else:
            table.remove(slot, some)
            for key in some:
                del held[slot][key]
    walk = table.walk(chain)
    there = keys[:length]
    assert walk.end == leading(set().union(*held), there)
    who = [{slot for slot in range(NUM_SLOTS) if key in held[slot]} for key in there]
    assert [set(walk.slots(block)) for block in range(walk.end)] == who[: walk.end]
    changed = [block for block in range(walk.end) if block == 0 or who[block] != who[block - 1]]
    assert set(changed) <= set(walk.starts)
    assert [walk.leading(mine) for mine in held] == [leading(mine, there) for mine in held]


@given(changes=changes, length=blocks, draw=st.floats(0, 1, exclude_max=True))
@example(
    changes=[(1, True, range(1)), (2, True, range(1, 200)), (0, True, range(1, 203))], length=201, draw=0.0
)
def test_a_lookup_names_the_longest_leading_runs(
    changes: list[tuple[int, bool, range]], length: int, draw: float
) -> None:
    """All that hold the first block are named with what they have of the prompt, the longest first."""
    told = Told()
    for replica in range(NUM_SLOTS):
        told.start(replica, part_hashes=50)
    held = [set[int]() for _ in range(NUM_SLOTS)]
    for replica, is_stored, span in changes:
        if is_stored:
            told.stored(replica, *span)
            held[replica] |= set(span)
        else:
            told.removed(replica, *span)
            held[replica] -= set(span)
    lookup = told.look_up(*range(length))
    expected = [leading(mine, list(range(length))) for mine in held]
    found = lookup.holders(100, draw)
    assert dict(found) == {replica: num for replica, num in enumerate(expected) if num}
    assert [num for _, num in found] == sorted((num for num in expected if num), reverse=True)
    assert [lookup.local(replica) for replica in range(NUM_SLOTS)] == expected


@given(
    known=blocks,
    starts=st.lists(blocks, max_size=12),
    holes=st.lists(blocks, max_size=3),
)
def test_what_the_store_adds_does_not_hang_on_what_was_asked_before(
    known: int, starts: list[int], holes: list[int]
) -> None:
    """From any block on, in any order, again: the run of blocks that the store has from there."""
    told = Told()
    told.start(1)
    told.stored(1, *range(known), tier=Tier.STORE)
    told.removed(1, *holes, tier=Tier.STORE)
    there = [n < known and n not in holes for n in range(LENGTH)]
    lookup = told.look_up(*range(LENGTH))
    for start in starts:
        run = next((n for n in range(start, LENGTH) if not there[n]), LENGTH) - start
        assert lookup.in_store(start) == run


def test_a_chain_is_hashed_a_stride_past_what_is_known() -> None:
    """A stride is 64 blocks, or 128 where more than that is known."""
    table = HolderTable()
    for num_known, most in ((0, 64), (63, 64), (64, 128), (127, 128), (128, 256), (300, 384)):
        chain = Chain(range(1000))
        table.add(0, chain.upto(1000)[len(table) : num_known])
        chain = Chain(range(1000))
        assert table.walk(chain).end == num_known
        assert chain.asked <= most
