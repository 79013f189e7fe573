"""Step outputs to text: the same text whatever the steps, one end a choice, failures raised."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.core.errors import AntiphonError, DeadlineExceeded, EngineFault, WorkerLost
from antiphon.core.generation import Generation, Sampling, StepOutput, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.models import ServedModel
from antiphon.gateway.text import Piece, TextStream
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from support.lines import Lines
from support.loopback import worker_info

MakeAnswer = Callable[..., Answer]


def stream(model: ServedModel, *answers: Answer, stops: tuple[str, ...] = ()) -> TextStream:
    return TextStream(answers, model, stops, Account("POST", None), Lines().logger())


async def pieces_of(text: TextStream) -> list[Piece]:
    return [piece async for batch in text.batches(60) for piece in batch]


async def test_text_and_end(model: ServedModel, say: MakeAnswer) -> None:
    """The last piece of a choice says why it ended."""
    pieces = await pieces_of(stream(model, say("hello")))
    assert "".join(piece.text for piece in pieces) == "hello"
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [Terminal.STOP]
    assert pieces[-1].finish_reason == "stop"


async def test_half_an_emoji_waits(model: ServedModel, say: MakeAnswer) -> None:
    """No piece holds part of a character; a torn one at the end becomes U+FFFD."""
    assert [p.text for p in await pieces_of(stream(model, say("a🎉")))] == ["a", "🎉", ""]
    assert [p.text for p in await pieces_of(stream(model, say("🎉".encode()[:3])))] == ["\ufffd"]


async def test_a_stop_string_ends_the_choice_at_the_worker(model: ServedModel) -> None:
    """Of two choices the one that met it; the other goes on."""
    generation = Generation(id="g", model="m", sampling=Sampling(seed=1, max_tokens=9), n=2)
    answer = Answer(generation)
    sent: list[int | None] = []
    Attempt(answer, generation).attach(worker_info(), lambda _, choice: sent.append(choice))
    for position, (first, second) in enumerate(zip(b"abSTOPx", b"abcdefg", strict=True)):
        answer.deliver(StepOutput("g", 0, position, [first]))
        answer.deliver(StepOutput("g", 1, position, [second]))
    answer.deliver(StepOutput("g", 1, 7, [], Terminal.LENGTH))
    whole = await stream(model, answer, stops=("STOP",)).whole()
    assert [(piece.text, piece.finish) for piece in whole] == [
        ("ab", Terminal.STOP),
        ("abcdefg", Terminal.LENGTH),
    ]
    assert sent == [0]


async def test_text_held_for_a_stop_string_leaves_at_the_end(model: ServedModel, say: MakeAnswer) -> None:
    """What only looked like a stop string is part of the answer."""
    (piece,) = await stream(model, say("the EN"), stops=("END",)).whole()
    assert piece.text == "the EN"


async def test_choices_of_several_answers_are_numbered_on(model: ServedModel, say: MakeAnswer) -> None:
    """Two prompts with n=2 have choices 0 to 3."""
    whole = await stream(model, say("one", n=2), say("two", n=2)).whole()
    assert [(piece.choice, piece.text) for piece in whole] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]


@given(text=st.text(max_size=30), per_step=st.integers(1, 7), stop=st.text(min_size=1, max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_steps_do_not_matter(
    model: ServedModel, say: MakeAnswer, text: str, per_step: int, stop: str
) -> None:
    """The pieces of a stream joined are the whole body's text, however tokens come, stop strings included."""
    (by_one,) = await stream(model, say(text), stops=(stop,)).whole()
    pieces = await pieces_of(stream(model, say(text, per_step=per_step), stops=(stop,)))
    assert "".join(piece.text for piece in pieces) == by_one.text == text.partition(stop)[0]
    assert pieces[-1].finish == by_one.finish


@given(text=st.text(max_size=20), per_step=st.integers(1, 7), stop=st.text(min_size=1, max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_scores_travel_with_their_text(
    model: ServedModel, say: MakeAnswer, text: str, per_step: int, stop: str
) -> None:
    """At every point the scored tokens' bytes cover the text that left; without a stop they are equal."""
    said = bytearray()
    left = ""
    stops = (stop,)
    for piece in await pieces_of(stream(model, say(text, per_step=per_step, logprobs=1), stops=stops)):
        said += bytes(byte for token in piece.tokens for byte in token.bytes or ())
        left += piece.text
        assert said.startswith(left.encode())
    if stop not in text:
        assert bytes(said) == text.encode()
    assert len(said) < len(left.encode()) + 4


FAILURES = [
    (Terminal.LOST, WorkerLost),
    (Terminal.ERROR, EngineFault),
    (Terminal.DEADLINE, DeadlineExceeded),
    (Terminal.ABORTED, WorkerLost),
]


@pytest.mark.parametrize(("finish", "error"), FAILURES)
async def test_a_bad_end_raises(
    model: ServedModel, say: MakeAnswer, finish: Terminal, error: type[AntiphonError]
) -> None:
    """In place of a finish reason that would pretend success."""
    with pytest.raises(error):
        await stream(model, say("hello", finish=finish)).whole()


async def test_why_a_step_failed_is_for_the_log_only(model: ServedModel, say: MakeAnswer) -> None:
    """The worker's words may name internals."""
    answer = Answer(Generation(id="g", model="m", sampling=Sampling(seed=1, max_tokens=9)))
    answer.deliver(StepOutput("g", 0, 0, [], Terminal.ERROR, error="llama_decode: -3 at 0x7f12"))
    lines = Lines()
    text = TextStream([answer], model, (), Account("POST", None), lines.logger())
    with pytest.raises(EngineFault) as caught:
        await text.whole()
    assert "0x7f12" not in caught.value.message
    assert lines.named("answer.failed")[0]["detail"] == "llama_decode: -3 at 0x7f12"


async def test_a_token_outside_the_vocabulary_is_the_workers_fault(
    model: ServedModel, say: MakeAnswer
) -> None:
    """The client hears of a failed answer, not of an index."""
    with pytest.raises(EngineFault):
        await stream(model, say([104, 9999])).whole()


async def test_the_account_counts(model: ServedModel, say: MakeAnswer) -> None:
    """Tokens of all choices, the prompt's cached ones once, and how each choice ended."""
    account = Account("POST", None)
    account.num_prompt_tokens = 5
    text = TextStream([say("hello", n=2)], model, (), account, Lines().logger())
    await text.whole()
    usage = account.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 10, 15)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert account.finishes == [Terminal.STOP, Terminal.STOP]
    assert account.queued_s == 0.25
    assert account.ttft_s is not None and math.isfinite(account.ttft_s)
    assert account.tpot_s is not None and account.tpot_s >= 0
