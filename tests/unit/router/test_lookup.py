"""Lookups: who holds how much of a prompt, what the store can add, how far a prompt is hashed for it."""

from __future__ import annotations

from antiphon.core.kvblock import Tier
from antiphon.router.directory import BlockDirectory
from antiphon.worker.blocknews import BlockFeed
from support.toldblocks import Chain, Told


def test_a_lookup_says_who_holds_how_much() -> None:
    """Longest first; who holds none of the first blocks is not named."""
    told = Told()
    for replica in (1, 2, 3, 4):
        told.start(replica)
    told.stored(1, 10, 11)
    told.stored(2, 10, 11, 12)
    told.stored(3, 10, 99)
    lookup = told.look_up(10, 11, 12, 13)
    assert lookup.holders(10, 0.0) == [(2, 3), (1, 2), (3, 1)]
    assert [lookup.local(replica) for replica in (1, 2, 3, 4, 5)] == [2, 3, 1, 0, 0]
    assert told.look_up(99, 10).holders(10, 0.0) == [(3, 2)]
    assert told.look_up(7, 10).holders(10, 0.0) == []
    assert told.look_up().holders(10, 0.0) == []


def test_what_lies_behind_a_gap_does_not_count() -> None:
    """A replica that evicted a block in the middle holds what is before it, even if nobody has more."""
    told = Told()
    told.start(1)
    told.start(2)
    told.stored(1, 1, 2, 3, 4)
    told.stored(2, 1, 2, 3, 4)
    told.removed(1, 2)
    lookup = told.look_up(1, 2, 3, 4)
    assert lookup.holders(10, 0.0) == [(2, 4), (1, 1)]
    told.removed(2, 1)
    lookup = told.look_up(1, 2, 3, 4)
    assert lookup.holders(10, 0.0) == [(1, 1)]
    assert lookup.local(2) == 0


def test_among_many_that_hold_the_same_chance_decides_who_is_named() -> None:
    """Thousands share a system prompt: a few are named, not always the same, and who has more always is."""
    told = Told()
    for replica in range(300):
        told.start(replica)
        told.stored(replica, 1, 2)
    told.stored(123, 3)
    lookup = told.look_up(1, 2, 3)
    named = [lookup.holders(4, draw) for draw in (0.0, 0.5, 0.99)]
    assert all(holders[0] == (123, 3) and len(holders) == 4 for holders in named)
    assert len({replica for holders in named for replica, _ in holders}) == 10


def test_a_prompt_is_hashed_no_further_than_somebody_knows_it() -> None:
    """Of a long cold prompt the first blocks are enough."""
    told = Told()
    told.start(1)
    told.stored(1, *range(100))
    cold, warm = Chain(range(1000, 9000)), Chain(range(8000))
    assert told.directory.look_up(cold, 0.0).holders(10, 0.0) == []
    assert told.directory.look_up(cold, 0.0).in_store(0) == 0
    assert told.directory.look_up(warm, 0.0).holders(10, 0.0) == [(1, 100)]
    assert cold.asked <= 64
    assert 100 < warm.asked <= 200


def test_the_store_adds_from_any_block_on() -> None:
    """What it can add behind a replica's own blocks, up to the first block that it lacks."""
    told = Told()
    told.start(1)
    told.stored(1, 1, 2)
    told.stored(1, *range(1, 201), tier=Tier.STORE)
    lookup = told.look_up(*range(1, 301))
    assert [lookup.in_store(start) for start in (0, 2, 150, 199, 200, 299, 300)] == [200, 198, 50, 1, 0, 0, 0]
    told.removed(1, 5, tier=Tier.STORE)
    lookup = told.look_up(*range(1, 301))
    assert [lookup.in_store(start) for start in (2, 4, 5)] == [2, 0, 195]
    assert lookup.holders(10, 0.0) == [(1, 2)]


def test_hints_about_the_store_outlive_the_worker_that_gave_them_and_come_with_snapshots() -> None:
    """The store is everybody's; a gateway that starts late learns what went there lately."""
    told = Told()
    told.start(1)
    told.stored(1, 1, 2, tier=Tier.STORE)
    told.directory.leave(1)
    assert told.look_up(1, 2).in_store(0) == 2
    late = BlockDirectory()
    late.join(5, told.workers[1].life, 0.0)
    feed = BlockFeed(told.workers[1])
    while (message := feed.take()) is not None:
        late.take(5, message, 0.0)
    assert late.look_up(Chain([1, 2]), 0.0).in_store(0) == 2
    assert late.num_blocks == 0
