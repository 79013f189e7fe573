"""What becomes of an answer that two workers compute when one of them fails, stalls or is too late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.core.generation import Generation, Role, Sampling, Terminal
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.watch import Patience
from support.fakefleet import FakeFleet, FakeWorker, token


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    """Three workers; a second copy after about half a second, when silence is noticed too."""
    made = FakeFleet([Role.BOTH] * 3, Patience(first_token_s=0.8, hedge_after_s=0.47))
    yield made
    made.loop.close()


def start(fleet: FakeFleet, n: int = 1) -> Answer:
    generation = Generation(
        id="g",
        model="scripted",
        sampling=Sampling(seed=1, max_tokens=4),
        token_ids=[7] * 20,
        num_prompt_tokens=20,
        n=n,
    )
    return fleet.within(lambda: fleet.dispatcher.start(generation))


def at(fleet: FakeFleet, attempt: Attempt) -> FakeWorker:
    """Who computes this one, having read it."""
    (worker,) = [worker for worker in fleet.workers if attempt in worker.link.attempts]
    worker.read()
    return worker


def computing(answer: Answer) -> list[Attempt]:
    return [attempt for attempt in answer.attempts if attempt.open_choices]


def finish(fleet: FakeFleet, answer: Answer) -> None:
    """Whoever has it does it, and nobody keeps anything of it."""
    (attempt,) = computing(answer)
    worker = at(fleet, attempt)
    fleet.say(worker, worker.step(attempt.generation.id, 4))
    assert answer.is_finished
    assert answer.received[0].tolist() == [token(0, n) for n in range(4)]
    assert not any(worker.link.num_open_answers or worker.after_reading() for worker in fleet.workers)


def test_a_worker_found_silent_and_slow_at_once_loses_its_answer_once(fleet: FakeFleet) -> None:
    """It moves because of the silence; what is left there is not hedged."""
    answer = start(fleet)
    fleet.say(at(fleet, answer.attempts[0]))
    at(fleet, answer.attempts[0]).is_silent = True
    fleet.advance(0.6)
    assert fleet.lines.named("link.silent")
    assert not fleet.lines.named("answer.hedged")
    finish(fleet, answer)


def test_one_copy_that_fails_leaves_the_other_alone(fleet: FakeFleet) -> None:
    """Though the answer may not be tried again: it is being computed."""
    answer = start(fleet)
    fleet.go_down(at(fleet, answer.attempts[0]))  # one vain move
    fleet.advance(0.6)
    first, second = computing(answer)
    worker = at(fleet, first)
    fleet.say(worker, worker.give_up(first.generation.id, Terminal.ERROR, "The step failed."))
    assert computing(answer) == [second]
    finish(fleet, answer)


def test_one_copy_that_is_overdue_leaves_the_other_alone(fleet: FakeFleet) -> None:
    """The second one has been there for less time."""
    answer = start(fleet)
    fleet.go_down(at(fleet, answer.attempts[0]))
    fleet.advance(0.9)
    assert len(computing(answer)) == 1
    assert answer.num_moves == 1
    finish(fleet, answer)


def test_choices_that_have_ended_are_not_computed_again(fleet: FakeFleet) -> None:
    """The second worker hears at once which of them nobody wants."""
    answer = start(fleet, n=3)
    fleet.within(lambda: answer.abort(1))
    fleet.advance(0.6)
    _, second = computing(answer)
    assert at(fleet, second).after_reading() == {second.generation.id: {0, 2}}
