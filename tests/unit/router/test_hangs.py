"""Requests under which workers fall silent for good, and requests that only were there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.core.errors import Quarantined
from antiphon.core.generation import Generation, Role, Sampling, Terminal
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.link import LOST_AFTER_S
from antiphon.router.watch import Patience
from support.fakefleet import FakeFleet, FakeWorker, token


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    """Four workers, and patience enough."""
    made = FakeFleet([Role.BOTH] * 4, Patience())
    yield made
    made.loop.close()


def generation(name: str = "g", prompt: int = 7) -> Generation:
    sampling = Sampling(seed=1, max_tokens=4)
    return Generation(
        id=name, model="scripted", sampling=sampling, token_ids=[prompt] * 20, num_prompt_tokens=20
    )


def start(fleet: FakeFleet, name: str = "g", prompt: int = 7) -> Answer:
    return fleet.within(lambda: fleet.dispatcher.start(generation(name, prompt)))


def place(fleet: FakeFleet, answer: Answer) -> tuple[FakeWorker, Attempt]:
    """Where it is computed, by whom it was read."""
    (attempt,) = [attempt for attempt in answer.attempts if attempt.open_choices]
    (worker,) = [worker for worker in fleet.workers if attempt in worker.link.attempts]
    worker.read()
    return worker, attempt


def speak(fleet: FakeFleet, answer: Answer) -> None:
    worker, attempt = place(fleet, answer)
    fleet.say(worker, worker.step(attempt.generation.id, 1))


def hang(fleet: FakeFleet, answer: Answer) -> FakeWorker:
    """Its worker falls silent; the answer leaves."""
    worker, _ = place(fleet, answer)
    worker.is_silent = True
    fleet.advance(0.6)
    return worker


def test_a_request_under_which_two_workers_are_lost_in_silence_is_kept_away(fleet: FakeFleet) -> None:
    """It left both before they were known to be lost; nobody like it is let in again."""
    answer = start(fleet)
    for _ in range(2):
        worker = hang(fleet, answer)
        assert not answer.is_finished
        fleet.advance(LOST_AFTER_S)
        assert not worker.link.is_up
    (last,) = answer.events.since(0)
    assert last.finish is Terminal.REFUSED
    assert (last.error or "").startswith("request_quarantined: ")
    with pytest.raises(Quarantined):
        start(fleet, "again")
    assert not start(fleet, "other", prompt=8).is_finished
    assert sum(worker.link.num_open_answers for worker in fleet.workers) == 1


def test_silence_that_ends_makes_nobody_suspect(fleet: FakeFleet) -> None:
    """Workers of a machine that is too busy stall in turn: who meets them is answered."""
    answers = [start(fleet, f"g{number}", prompt=number) for number in range(3)]
    for turn in range(3):
        worker = hang(fleet, answers[turn % 2])
        worker.is_silent = False
        fleet.advance(0.4)
    fleet.advance(LOST_AFTER_S)
    assert [answer.num_suspicions for answer in answers] == [0, 0, 0]
    for answer in answers:
        for _ in range(4):
            speak(fleet, answer)
        assert answer.received[0].tolist() == [token(0, n) for n in range(4)]


def test_who_spoke_elsewhere_in_the_meantime_was_not_the_cause(fleet: FakeFleet) -> None:
    """However many of its workers are lost after it has left."""
    answer = start(fleet)
    for number in range(2):
        hang(fleet, answer)
        speak(fleet, answer)
        fleet.advance(LOST_AFTER_S)
        assert answer.num_suspicions == 0
        assert answer.num_received == number + 1
    assert not answer.is_finished
    assert start(fleet, "again").num_open_choices


def test_those_that_left_together_are_suspects_together(fleet: FakeFleet) -> None:
    """It may have been either of two, so neither is ended; those of other workers are no suspects."""
    first = start(fleet)
    others = [start(fleet, f"g{number}", prompt=number) for number in range(8, 15)]
    worker, _ = place(fleet, first)
    together = [a for a in (first, *others) if place(fleet, a)[0] is worker]
    assert len(together) == 2
    hang(fleet, first)
    fleet.advance(LOST_AFTER_S)
    assert [answer.num_suspicions for answer in together] == [1, 1]
    assert sum(answer.num_suspicions for answer in others) == 1
    assert not any(answer.is_finished for answer in (first, *others))
