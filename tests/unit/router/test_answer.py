"""Answers as they arrive: what is taken, what is refused, and that each choice ends once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import RequestTimeout
from antiphon.core.generation import Generation, Sampling, StepOutput, Terminal, TokenLogprobs
from antiphon.router.answer import Answer, ProtocolFault, Reader
from antiphon.router.attempt import Attempt
from support.loopback import worker_info


def make_answer(n: int = 1, max_tokens: int = 8, logprobs: int | None = None) -> Answer:
    sampling = Sampling(seed=1, max_tokens=max_tokens, logprobs=logprobs)
    return Answer(Generation(id="g", model="m", sampling=sampling, n=n))


def output(position: int, ids: list[int], choice: int = 0, finish: Terminal | None = None) -> StepOutput:
    return StepOutput("g", choice, position, ids, finish)


def finishes(answer: Answer) -> list[tuple[int, Terminal]]:
    return [(e.choice, e.finish) for e in answer.events.since(0) if e.finish is not None]


def test_ids_received_are_kept_for_a_failover() -> None:
    """Tokens of a choice are gathered in order, whatever the steps' sizes."""
    answer = make_answer()
    answer.deliver(output(0, [5, 6]))
    answer.deliver(output(2, [7]))
    assert answer.received[0].tolist() == [5, 6, 7]
    assert answer.has_started


@pytest.mark.parametrize(
    "bad",
    [
        output(0, [1], choice=1),
        output(0, [1], choice=-1),
        output(1, [1]),
        output(0, [-1]),
        output(0, [2**32]),
        output(0, []),
        output(0, [1] * 9),
    ],
    ids=["choice", "negative choice", "gap", "negative id", "huge id", "nothing", "too many"],
)
def test_what_cannot_be_true_is_a_fault(bad: StepOutput) -> None:
    """Outputs that contradict the request or what came before are refused, and nothing of them is kept."""
    answer = make_answer()
    with pytest.raises(ProtocolFault):
        answer.deliver(bad)
    assert answer.events.next_number == 0
    assert not answer.is_finished


def test_log_probabilities_must_match_the_ids() -> None:
    """A choice that is scored has one score a token."""
    answer = make_answer(logprobs=0)
    with pytest.raises(ProtocolFault):
        answer.deliver(output(0, [1]))
    answer.deliver(StepOutput("g", 0, 0, [1], None, [TokenLogprobs(-1.0)]))
    assert answer.received[0].tolist() == [1]


def test_the_log_closes_with_the_last_choice() -> None:
    """Two choices: the log stays open until both have ended."""
    answer = make_answer(n=2)
    answer.deliver(output(0, [], choice=1, finish=Terminal.STOP))
    assert not answer.events.is_closed
    answer.deliver(output(0, [3], choice=0, finish=Terminal.LENGTH))
    assert answer.events.is_closed
    assert finishes(answer) == [(1, Terminal.STOP), (0, Terminal.LENGTH)]


def test_abort_reaches_the_worker_once() -> None:
    """Ending an answer again, or after its end, sends nothing more."""
    answer = make_answer()
    sent: list[int | None] = []
    attempt = Attempt(answer, answer.generation)
    attempt.attach(worker_info(), lambda _, choice: sent.append(choice))
    answer.abort()
    answer.abort()
    answer.abort(0)
    assert sent == [None]
    assert finishes(answer) == [(0, Terminal.ABORTED)]


def test_tokens_on_their_way_to_an_ended_choice_are_dropped() -> None:
    """After a stop string the worker's next frame may still hold tokens of that choice."""
    answer = make_answer(n=2)
    answer.deliver(output(0, [1]))
    answer.abort(0)
    answer.deliver(output(1, [2]))
    answer.deliver(output(0, [9], choice=1))
    assert answer.received[0].tolist() == [1]
    assert answer.num_open_choices == 1


@given(st.data())
def test_every_choice_ends_exactly_once(data: st.DataObject) -> None:
    """Whatever order of tokens, ends, aborts and loss: one end a choice, and nothing after it."""
    n = data.draw(st.integers(1, 3))
    answer = make_answer(n=n)
    Attempt(answer, answer.generation).attach(worker_info(), lambda *_: None)
    for _ in range(data.draw(st.integers(0, 12))):
        choice = data.draw(st.integers(0, n - 1))
        action = data.draw(st.sampled_from(["token", "end", "abort", "abort all", "lose"]))
        room = len(answer.received[choice]) < answer.generation.sampling.max_tokens
        if action == "token" and room:
            answer.deliver(output(len(answer.received[choice]), [1], choice))
        elif action == "end":
            answer.deliver(output(len(answer.received[choice]), [], choice, Terminal.STOP))
        elif action == "abort":
            answer.abort(choice)
        elif action == "abort all":
            answer.abort()
        elif action == "lose":
            answer.end(Terminal.LOST)
    answer.end(Terminal.LOST)
    assert Counter(choice for choice, _ in finishes(answer)) == Counter(range(n))
    assert answer.events.is_closed
    ended: set[int] = set()
    for event in answer.events.since(0):
        assert event.choice not in ended
        if event.finish is not None:
            ended.add(event.choice)


async def test_one_wake_up_takes_all_that_came() -> None:
    """A reader that was slow gets everything at once and leaves nothing behind in the log."""
    answer = make_answer()
    reader = Reader([answer], idle_s=60)
    waiting = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    answer.deliver(output(0, [1]))
    answer.deliver(output(1, [2]))
    events = await waiting
    assert events is not None
    assert [event.ids for _, event in events] == [[1], [2]]
    answer.deliver(output(2, [], finish=Terminal.STOP))
    assert await reader.read() == [(0, output(2, [], finish=Terminal.STOP))]
    assert await reader.read() is None
    reader.close()


async def test_events_read_are_forgotten() -> None:
    """An open stream holds what was not read yet, not all it ever said."""
    answer = make_answer(max_tokens=100)
    reader = Reader([answer], idle_s=60)
    for position in range(100):
        answer.deliver(output(position, [1]))
        await reader.read()
    assert answer.events.since(answer.events.next_number) == []
    with pytest.raises(LookupError):
        answer.events.since(0)
    reader.close()


async def test_a_reader_that_lost_its_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read is bounded; the reader never gets an answer with a hole in it."""
    monkeypatch.setattr("antiphon.router.answer.MAX_UNREAD", 5)
    answer = make_answer()
    reader = Reader([answer], idle_s=60)
    for position in range(6):
        answer.deliver(output(position, [1]))
    with pytest.raises(RequestTimeout):
        await reader.read()
    reader.close()


async def test_silence_is_reported_again_and_again() -> None:
    """Each period without events ends in one empty batch; events in between start a new period."""
    answer = make_answer()
    reader = Reader([answer], idle_s=0.01)
    assert await reader.read() == []
    assert await reader.read() == []
    answer.deliver(output(0, [1]))
    assert await reader.read() == [(0, output(0, [1]))]
    assert await reader.read() == []
    reader.close()


async def test_a_reader_of_two_answers_ends_with_the_later_one() -> None:
    """Events carry the index of their answer."""
    first, second = make_answer(), make_answer()
    reader = Reader([first, second], idle_s=60)
    second.end(Terminal.STOP)
    assert await reader.read() == [(1, output(0, [], finish=Terminal.STOP))]
    first.end(Terminal.LENGTH)
    assert await reader.read() == [(0, output(0, [], finish=Terminal.LENGTH))]
    assert await reader.read() is None
    reader.close()
