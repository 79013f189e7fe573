"""The gateway's directory: gaps and snapshots, copies in two tiers, bounds, replicas that come and go."""

from __future__ import annotations

import pytest

from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks, pack_keys
from antiphon.kv.events import Change
from antiphon.router import directory as module
from antiphon.worker.blocknews import BlockFeed
from support.toldblocks import Told, hash_of


def test_a_block_in_two_tiers_is_gone_when_both_let_go() -> None:
    """Row 37: one of two copies is evicted, in either order; the block stays until the last one goes."""
    for first, last in ((Tier.ENGINE, Tier.HOST), (Tier.HOST, Tier.ENGINE)):
        told = Told()
        told.start(1)
        told.stored(1, 7, tier=Tier.ENGINE)
        told.stored(1, 7, tier=Tier.HOST)
        told.removed(1, 7, tier=first)
        assert told.look_up(7).local(1) == 1
        told.removed(1, 7, tier=last)
        assert told.look_up(7).local(1) == 0
        assert told.directory.num_blocks == 0


def test_removing_what_is_not_there_changes_nothing() -> None:
    """Row 37: unknown blocks, twice the same, another tier's; nothing goes below zero."""
    told = Told()
    told.start(1)
    told.stored(1, 1, 2, tier=Tier.HOST)
    told.removed(1, 1, tier=Tier.ENGINE)
    told.removed(1, 9, 9)
    assert told.look_up(1, 2).local(1) == 2
    told.removed(1, 2, 2, tier=Tier.HOST)
    assert told.look_up(1, 2).local(1) == 1
    assert told.directory.num_blocks == 1


def test_a_gap_is_noticed_and_a_snapshot_heals_it() -> None:
    """Row 37: what was known stays while it is waited for; the snapshot says what is true."""
    told = Told()
    told.start(1)
    told.stored(1, 1, 2)
    told.workers[1].record(Change.REMOVED, Tier.ENGINE, [hash_of(2)])
    told.messages(1)  # lost
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(3)])
    assert told.take(1, *told.messages(1))
    assert told.look_up(1, 2, 3).local(1) == 2
    assert not told.directory.is_complete(1)
    told.feeds[1].resync()
    assert not told.take(1, *told.messages(1))
    assert told.look_up(1, 3).local(1) == 2
    assert told.look_up(2).local(1) == 0
    assert told.directory.is_complete(1)
    assert (told.directory.counts.num_gaps, told.directory.counts.num_resyncs) == (1, 1)


def test_a_worker_that_does_not_answer_is_not_asked_again_and_again() -> None:
    """Row 37: recovery does not loop; the index is not emptied by it."""
    told = Told()
    told.start(1)
    told.stored(1, 1)
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(2)])
    told.messages(1)  # lost
    asked = []
    for number in range(10, 31):
        told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(number)])
        asked.append(told.take(1, *told.messages(1)))
        told.now += 1.0
    assert asked.count(True) == 1 + 20 // module.RESYNC_AGAIN_S
    assert told.directory.counts.num_gaps == 1
    assert told.look_up(1).local(1) == 1


def test_messages_that_come_late_or_twice_change_nothing() -> None:
    """A change that was taken in already is not taken in again, alone or as part of a longer message."""
    told = Told()
    told.start(1)
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(1)])
    first = told.messages(1)
    told.workers[1].record(Change.REMOVED, Tier.ENGINE, [hash_of(1)])
    second = told.messages(1)
    assert not told.take(1, *first, *second, *first, *second)
    assert told.look_up(1).local(1) == 0
    both = Blocks(first[0].life, 3, [*first[0].changes, *second[0].changes, *first[0].changes])
    assert not told.take(1, both)
    assert told.look_up(1).local(1) == 1
    assert told.directory.counts.num_gaps == 0


def test_what_was_missed_and_comes_after_all_is_taken_in() -> None:
    """Two messages that change places: the gap closes by itself, and the late snapshot is not needed."""
    told = Told()
    told.start(1)
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(1)])
    first = told.messages(1)
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(2)])
    second = told.messages(1)
    assert told.take(1, *second)
    assert not told.take(1, *first, *second)
    assert told.directory.is_complete(1)
    assert told.look_up(1, 2).local(1) == 2


def test_a_restarted_worker_begins_anew_and_its_former_life_is_not_heard() -> None:
    """Nothing of what it held is believed, late messages of then change nothing, nobody asks for them."""
    told = Told()
    told.start(1)
    told.stored(1, 1, 2)
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(3)])
    late = told.messages(1)
    told.feeds[1].resync()
    late += told.messages(1)
    told.start(1)
    assert told.look_up(1, 2).holders(10, 0.0) == []
    assert not told.take(1, *late)
    assert told.look_up(1, 2, 3).holders(10, 0.0) == []
    told.stored(1, 1)
    assert told.look_up(1, 2).local(1) == 1


def test_a_snapshot_in_parts_is_believed_part_by_part_and_replaces_at_its_end() -> None:
    """Until then nothing that was known goes: a resync does not empty the directory."""
    told = Told()
    told.start(1, part_hashes=2)
    told.stored(1, 1, 2)
    told.workers[1].record(Change.REMOVED, Tier.ENGINE, [hash_of(1)])
    told.workers[1].record(Change.STORED, Tier.ENGINE, [hash_of(3), hash_of(4)])
    told.feeds[1].resync()
    first, second = told.messages(1)
    assert not told.take(1, first)
    assert told.look_up(1, 2).local(1) == 2
    assert not told.take(1, second)
    assert [told.look_up(n).local(1) for n in (1, 2, 3, 4)] == [0, 1, 1, 1]


def test_a_snapshot_with_a_part_missing_is_begun_again() -> None:
    """Half of the truth replaces nothing."""
    told = Told()
    told.start(1, part_hashes=1)
    told.stored(1, 9)
    told.workers[1].record(Change.STORED, Tier.HOST, [hash_of(n) for n in (1, 2, 3)])
    first, second, third, fourth = told.messages(1)
    assert told.take(1, first, third)
    assert told.look_up(9).local(1) == 1
    assert not told.take(1, second, fourth)
    told.feeds[1].resync()
    assert not told.take(1, *told.messages(1))
    assert told.directory.num_blocks_of(1) == 4
    assert told.directory.is_complete(1)


def test_changes_that_come_between_the_parts_of_a_snapshot_end_it() -> None:
    """They are older than it: taken in, and the rest of the snapshot must not make them the last word."""
    told = Told()
    worker = told.start(1)
    worker.record(Change.STORED, Tier.ENGINE, [hash_of(1)])
    late = told.messages(1)
    worker.record(Change.REMOVED, Tier.ENGINE, [hash_of(1)])
    told.messages(1)  # lost
    worker.record(Change.STORED, Tier.HOST, [hash_of(5), hash_of(6)])
    told.feeds[1] = BlockFeed(worker, part_hashes=1)
    first, second = told.messages(1)
    assert not told.take(1, first, *late)
    assert told.take(1, second)
    told.feeds[1].resync()
    assert not told.take(1, *told.messages(1))
    assert [told.look_up(n).local(1) for n in (1, 5, 6)] == [0, 1, 1]


def test_a_snapshot_says_which_tiers_hold_a_block_now() -> None:
    """A tier that let go unheard does not keep the block alive when the other one lets go too."""
    told = Told()
    worker = told.start(1)
    told.stored(1, 7, tier=Tier.ENGINE)
    worker.record(Change.STORED, Tier.HOST, [hash_of(7)])
    worker.record(Change.REMOVED, Tier.ENGINE, [hash_of(7)])
    told.feeds[1].resync()
    told.pass_on(1)
    assert told.look_up(7).local(1) == 1
    told.removed(1, 7, tier=Tier.HOST)
    assert told.look_up(7).local(1) == 0


def test_a_second_gap_is_asked_about_at_once_where_the_first_was_healed() -> None:
    """Pauses are for workers that do not answer."""
    told = Told()
    worker = told.start(1)
    for number in (1, 2):
        worker.record(Change.STORED, Tier.ENGINE, [hash_of(number)])
        told.messages(1)  # lost
        worker.record(Change.STORED, Tier.ENGINE, [hash_of(10 + number)])
        told.pass_on(1)
        assert told.directory.is_complete(1)
    assert told.directory.counts.num_resyncs == told.directory.counts.num_gaps == 2


def test_changes_before_the_first_snapshot_ask_for_it() -> None:
    """They cannot be understood; a worker that is not here is not listened to at all."""
    told = Told()
    news = Blocks(5, 3, [BlockChange(Tier.ENGINE, True, pack_keys([hash_of(1)]))])
    assert not told.take(1, news)
    told.directory.join(1, 5, 0.0)
    assert told.take(1, news)
    assert told.look_up(1).local(1) == 0


def test_a_replica_that_leaves_is_found_no_more_and_cleaned_up_in_slices() -> None:
    """At once for those who ask, whatever is left in the tables; others keep what they hold."""
    told = Told()
    told.start(1)
    told.start(2)
    told.stored(1, *range(100))
    told.stored(2, *range(50))
    told.directory.leave(1)
    lookup = told.look_up(*range(100))
    assert lookup.holders(10, 0.0) == [(2, 50)]
    assert lookup.local(1) == 0
    slices = 1
    while told.directory.tidy(30):
        slices += 1
    assert slices == 4
    assert told.directory.num_blocks == 50
    assert told.look_up(*range(100)).holders(10, 0.0) == [(2, 50)]
    told.directory.leave(1)
    assert not told.directory.tidy()


def test_blocks_are_bounded_and_the_largest_replica_pays() -> None:
    """Row 43: what it told first goes, counted; small ones keep theirs; what comes later is still known."""
    told = Told(most_blocks=100)
    told.start(1)
    told.start(2)
    told.stored(2, *range(1000, 1010))
    for start in range(0, 500, 10):
        told.stored(1, *range(start, start + 10))
        assert told.directory.num_blocks <= 100
    assert told.directory.num_blocks_of(2) == 10
    assert told.directory.counts.num_dropped == 510 - told.directory.num_blocks
    assert told.look_up(*range(490, 500)).local(1) == 10
    assert told.look_up(0).local(1) == 0
    told.removed(1, *range(500))
    assert told.directory.num_blocks == 10
    assert told.directory.is_complete(1)


def test_what_was_dropped_for_want_of_room_does_not_come_back_by_a_snapshots_end() -> None:
    """A snapshot larger than the bound is cut to it and is complete all the same: nobody asks again."""
    told = Told(most_blocks=50)
    told.start(1, part_hashes=20)
    told.stored(1, 7)
    told.workers[1].record(Change.STORED, Tier.HOST, [hash_of(n) for n in range(100, 300)])
    told.pass_on(1)
    assert told.directory.num_blocks == told.directory.num_blocks_of(1) <= 50
    assert told.directory.is_complete(1)
    assert told.directory.counts.num_resyncs == 0


def test_those_that_left_make_room_before_anybody_loses_blocks() -> None:
    """What is only waiting to be cleaned up is no reason to forget."""
    told = Told(most_blocks=100)
    told.start(1)
    told.stored(1, *range(90))
    told.directory.leave(1)
    told.start(2)
    told.stored(2, *range(80))
    assert told.directory.num_blocks_of(2) == 80
    assert told.directory.counts.num_dropped == 0


@pytest.mark.parametrize("num_replicas", [2, 40])
def test_years_of_coming_and_going_leave_nothing_behind(num_replicas: int) -> None:
    """Row 43: replicas restart, blocks come and go; when all have left and it is tidied, all is empty."""
    told = Told(most_stored=50)
    for turn in range(200):
        replica = turn % num_replicas
        told.start(replica)
        told.stored(replica, *range(turn, turn + 20))
        told.stored(replica, *range(turn, turn + 20), tier=Tier.STORE)
        told.removed(replica, *range(turn, turn + 7))
        told.directory.tidy()
    for replica in range(num_replicas):
        told.directory.leave(replica)
    while told.directory.tidy():
        pass
    assert told.directory.num_blocks == 0
    assert told.directory.num_stored <= 50
    assert told.look_up(*range(0, 250, 3)).end == 0
