"""Room: how much more may go to a worker."""

from __future__ import annotations

from antiphon.core.generation import Priority, WorkerRates
from antiphon.router.lane import Ticket
from antiphon.router.policy import ReplicaState
from antiphon.router.room import Room, room_of


def worker(**state: object) -> ReplicaState:
    usual = {"running": 1, "max_sequences": 8, "num_blocks": 100, "free_blocks": 100}
    return ReplicaState(0, **(usual | state))


def ticket(num_tokens: int = 100, num_prompt_tokens: int = 50, num_sequences: int = 1) -> Ticket:
    return Ticket(
        "t",
        Priority.DEFAULT,
        num_tokens,
        1e9,
        0.0,
        num_prompt_tokens=num_prompt_tokens,
        num_sequences=num_sequences,
    )


def let_in(room: Room, like: Ticket) -> int:
    """How many such requests go in."""
    count = 0
    while room.fits(like):
        room.take(like)
        count += 1
    return count


def test_free_slots_and_nobody_to_wait_for_one() -> None:
    """Who waits at a worker waits behind all that came before, whosever they are."""
    assert let_in(room_of(worker(), 16), ticket(10, 1)) == 7
    assert let_in(room_of(worker(running=8), 16), ticket(10, 1)) == 0
    assert let_in(room_of(worker(running=8, waiting=1), 16), ticket(10, 1)) == 0


def test_what_was_sent_since_the_report_counts() -> None:
    """The report cannot know it yet."""
    assert let_in(room_of(worker(dispatched=3), 16), ticket(10, 1)) == 4
    assert let_in(room_of(worker(own=8), 16), ticket(10, 1)) == 0


def test_prompts_wait_here_rather_than_there() -> None:
    """A tenth of a second of prefill may wait at a worker, then no more comes."""
    rates = WorkerRates(prefill_tokens_per_s=1000.0)
    assert let_in(room_of(worker(rates=rates), 16), ticket(10, 40)) == 3
    assert let_in(room_of(worker(rates=rates, waiting_tokens=100), 16), ticket(10, 100)) == 0


def test_kv_that_is_not_there_is_not_promised() -> None:
    """Free and cached blocks hold what is expected, prompt and answer."""
    assert let_in(room_of(worker(free_blocks=20), 16), ticket(100, 1)) == 3
    assert let_in(room_of(worker(free_blocks=0, num_blocks=0), 16), ticket(100, 1)) == 7, (
        "not known: no bound"
    )


def test_a_very_long_one_does_not_wait_for_an_empty_worker() -> None:
    """A quarter of the blocks free is enough; it waits there, and those behind it find other workers."""
    long = ticket(1500, 1)
    assert let_in(room_of(worker(free_blocks=25), 16), long) == 1
    assert let_in(room_of(worker(free_blocks=24), 16), long) == 0


def test_an_idle_worker_takes_anything_once() -> None:
    """A request that fits nowhere is the worker's to refuse; it does not wait for ever."""
    room = room_of(worker(running=0, free_blocks=1), 16)
    assert let_in(room, ticket(10_000, 9_000)) == 1


def test_many_sequences_go_where_there_is_room_for_one() -> None:
    """The rest of them wait at the worker, and nothing else comes before they run."""
    room = room_of(worker(running=7), 16)
    assert let_in(room, ticket(10, 1, num_sequences=64)) == 1
    assert room.sequences < 0
