"""The fetcher's books: who waits for what, who is done when, and that nobody is told twice."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.core.kvblock import KvBlock
from antiphon.kv.flights import Flights, Job, Outcome, Waiter
from support.kvchains import chain, payload_of

CHAIN = chain(6)


def waiter(blocks: Sequence[KvBlock], name: str = "g", *, now: float = 0.0, block_s: float = 0.0) -> Waiter:
    return Waiter(name, blocks, now, 0.04, block_s, lambda waiter: None)


def land(flights: Flights, job: Job, num: int, end: Outcome | None = None) -> list[Waiter]:
    """The next `num` blocks of the job come."""
    blocks = job.blocks[job.num_landed : job.num_landed + num]
    return flights.land(job, [payload_of(block) for block in blocks], end)


def test_a_waiter_is_done_when_everything_came() -> None:
    """In order, with the payloads of exactly its blocks."""
    flights, one = Flights(), waiter(CHAIN)
    (job,) = flights.open(one)
    assert list(job.blocks) == CHAIN
    assert land(flights, job, 4) == []
    assert land(flights, job, 2) == [one]
    assert one.outcome is Outcome.FETCHED
    assert one.ready == [(block, payload_of(block)) for block in CHAIN]
    assert (flights.num_blocks, flights.num_waiters) == (0, 0)


def test_a_miss_ends_the_wait() -> None:
    """With what lay before it; the outcome says missed only where there was nothing."""
    flights, some, none = Flights(), waiter(CHAIN, "some"), waiter(chain(3, start=1000), "none")
    (job,) = flights.open(some)
    assert land(flights, job, 2, Outcome.MISSED) == [some]
    assert (some.num_ready, some.outcome) == (2, Outcome.FETCHED)
    (job,) = flights.open(none)
    assert land(flights, job, 0, Outcome.MISSED) == [none]
    assert (none.num_ready, none.outcome) == (0, Outcome.MISSED)
    assert flights.num_blocks == 0


def test_a_cut_is_named_whatever_came_before() -> None:
    """A fault or a deadline after some blocks is told as what it is."""
    for end in (Outcome.LATE, Outcome.FAULT):
        flights, one = Flights(), waiter(CHAIN)
        (job,) = flights.open(one)
        assert land(flights, job, 3, end) == [one]
        assert (one.num_ready, one.outcome) == (3, end)


def test_equal_prompts_are_fetched_once() -> None:
    """Followers join the leader's job and get the same bytes with it."""
    flights = Flights()
    leader, follower = waiter(CHAIN, "leader"), waiter(CHAIN, "follower")
    (job,) = flights.open(leader)
    assert flights.open(follower) == []
    assert flights.num_blocks == len(CHAIN)
    assert set(land(flights, job, 6)) == {leader, follower}
    assert leader.ready == follower.ready


def test_a_follower_fetches_what_the_leader_does_not() -> None:
    """Its own longer tail is a job of its own, and may come first."""
    flights = Flights()
    leader, follower = waiter(CHAIN[:3], "leader"), waiter(CHAIN, "follower")
    (front,) = flights.open(leader)
    assert flights.count_new(CHAIN) == 3
    (tail,) = flights.open(follower)
    assert list(tail.blocks) == CHAIN[3:]
    assert land(flights, tail, 3) == []
    assert set(land(flights, front, 3)) == {leader, follower}
    assert follower.num_ready == 6


def test_who_joins_late_gets_what_is_still_to_come() -> None:
    """Blocks that came before it joined are not under way any more: it fetches them itself."""
    flights, leader, late = Flights(), waiter(CHAIN, "leader"), waiter(CHAIN, "late")
    (job,) = flights.open(leader)
    land(flights, job, 2)
    (front,) = flights.open(late)
    assert list(front.blocks) == CHAIN[:2]
    assert land(flights, job, 4) == [leader]
    assert land(flights, front, 2) == [late]
    assert late.ready == leader.ready


def test_a_leader_in_the_middle_leaves_both_ends_to_the_follower() -> None:
    """Runs around what is under way become jobs in the order of the blocks."""
    flights, leader, follower = Flights(), waiter(CHAIN[2:4], "leader"), waiter(CHAIN, "follower")
    flights.open(leader)
    front, back = flights.open(follower)
    assert (list(front.blocks), list(back.blocks)) == (CHAIN[:2], CHAIN[4:])


def test_a_leader_that_ends_early_releases_its_followers() -> None:
    """A follower whose next block will not come does not wait for its own tail behind the hole."""
    flights, leader, follower = Flights(), waiter(CHAIN[:3], "leader"), waiter(CHAIN, "follower")
    (front,) = flights.open(leader)
    (tail,) = flights.open(follower)
    assert set(land(flights, front, 1, Outcome.MISSED)) == {leader, follower}
    assert follower.num_ready == 1
    assert not flights.is_wanted(tail)
    assert land(flights, tail, 0, Outcome.LATE) == []
    assert flights.num_blocks == 0


def test_the_deadline_moves_with_what_has_been_saved() -> None:
    """Patience, plus the time that computing the blocks would have taken."""
    flights, one = Flights(), waiter(CHAIN, now=10.0, block_s=0.5)
    (job,) = flights.open(one)
    assert flights.next_deadline_s == 10.04
    land(flights, job, 2)
    assert flights.next_deadline_s == 11.04
    assert flights.overdue(11.03) == ([], [])
    assert flights.overdue(11.04) == ([one], [job])
    assert (one.num_ready, one.outcome) == (2, Outcome.LATE)
    assert flights.next_deadline_s is None


def test_who_waits_its_turn_gains_by_what_comes_before() -> None:
    """The engine would have computed those blocks first; blocks of those behind it gain it nothing."""
    flights = Flights()
    first, second, third = (
        waiter(chain(3, start=1000 * n), name, block_s=0.5) for n, name in enumerate(("a", "b", "c"))
    )
    (job_a,), (job_b,), (job_c,) = (flights.open(one) for one in (first, second, third))
    land(flights, job_a, 2)
    assert [one.deadline_s for one in (first, second, third)] == [1.04, 1.04, 1.04]
    land(flights, job_c, 1)
    assert [one.deadline_s for one in (first, second, third)] == [1.04, 1.04, 1.54]
    land(flights, job_b, 1)
    assert [one.deadline_s for one in (first, second, third)] == [1.04, 1.54, 2.04]


def test_a_block_is_gained_once() -> None:
    """A follower of the block's own job counts it as ready, not as one that came before."""
    flights, leader, follower = Flights(), waiter(CHAIN, "a", block_s=0.5), waiter(CHAIN, "b", block_s=0.5)
    (job,) = flights.open(leader)
    flights.open(follower)
    land(flights, job, 1)
    assert leader.deadline_s == follower.deadline_s == 0.54


def test_who_is_overdue_is_told_once() -> None:
    """What comes afterwards belongs to nobody."""
    flights, one = Flights(), waiter(CHAIN)
    (job,) = flights.open(one)
    assert flights.overdue(1.0)[0] == [one]
    assert flights.overdue(2.0)[0] == []
    assert land(flights, job, 6) == []
    assert one.num_ready == 0


def test_time_left_is_that_of_the_most_patient() -> None:
    """A job goes on while anybody can still use it."""
    flights, early, later = Flights(), waiter(CHAIN, "early"), waiter(CHAIN, "later", now=1.0)
    (job,) = flights.open(early)
    flights.open(later)
    assert flights.time_left_s(job, 1.0) == later.deadline_s - 1.0
    flights.cancel("later")
    assert flights.time_left_s(job, 1.0) == early.deadline_s - 1.0
    flights.cancel("early")
    assert flights.time_left_s(job, 1.0) == 0.0


def test_a_cancelled_waiter_is_not_told() -> None:
    """Others who wait for the same blocks are."""
    flights, one, other = Flights(), waiter(CHAIN, "one"), waiter(CHAIN, "other")
    (job,) = flights.open(one)
    flights.open(other)
    flights.cancel("one")
    flights.cancel("nobody")
    assert land(flights, job, 6) == [other]


def test_a_generation_that_begins_again_replaces_itself() -> None:
    """Preempted and back before the first answer: only the newer wait counts."""
    flights, old, new = Flights(), waiter(CHAIN), waiter(CHAIN)
    (job,) = flights.open(old)
    assert flights.open(new) == []
    assert land(flights, job, 6) == [new]
    assert flights.num_waiters == 0


def test_everybody_is_told_at_the_end() -> None:
    """A store that is closed owes nobody an answer, the fetcher does."""
    flights, one, other = Flights(), waiter(CHAIN, "one"), waiter(chain(2, start=1000), "other")
    flights.open(one)
    flights.open(other)
    assert flights.end_all() == [one, other]
    assert {one.outcome, other.outcome} == {Outcome.FAULT}
    assert flights.num_waiters == 0
