"""Loads: which requests, when, and what their answers amount to.

Open loads send each request when it is due, whether or not earlier ones were answered, and count TTFT
from then: a server that stalls cannot hide it (no coordinated omission). `in_turn` is the closed load of
one stream. Everything random is drawn from the seed, so both servers of a pair get the same load.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.client import Answer, Request, Target, send
from bench.errors import BenchFault


class Vocabulary:
    """English words, each of which is one token of the built-in model when a space stands before it."""

    def __init__(self) -> None:
        self.words = (Path(__file__).parent / "words.txt").read_text().split()

    def text(self, draw: random.Random, num_tokens: int) -> str:
        """Random words: this many tokens for the built-in model."""
        return "".join(" " + word for word in draw.choices(self.words, k=num_tokens))


def poisson(draw: random.Random, num: int, per_s: float) -> list[float]:
    """Due times of `num` arrivals at this mean rate, the first at once."""
    times = [0.0]
    while len(times) < num:
        times.append(times[-1] + draw.expovariate(per_s))
    return times


def completions(
    draw: random.Random, due_s: Sequence[float], *, model: str, prompt_tokens: int, answer_tokens: int
) -> list[Request]:
    """Streamed greedy text completions of distinct random prompts, with answers of exact length."""
    vocabulary = Vocabulary()
    return [
        Request(
            at_s=at_s,
            path="/v1/completions",
            body=msgspec.json.encode(
                {
                    "model": model,
                    "prompt": vocabulary.text(draw, prompt_tokens),
                    "max_tokens": answer_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ),
            num_tokens=answer_tokens,
        )
        for at_s in due_s
    ]


def chats(
    due_s: Sequence[float], turns: Sequence[tuple[str, str]], *, model: str, answer_tokens: int
) -> list[Request]:
    """Streamed greedy chats, each of one system prompt and one user turn."""
    return [
        Request(
            at_s=at_s,
            path="/v1/chat/completions",
            body=msgspec.json.encode(
                {
                    "model": model,
                    "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
                    "max_tokens": answer_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ),
            num_tokens=answer_tokens,
        )
        for at_s, (system, user) in zip(due_s, turns, strict=True)
    ]


async def open_load(target: Target, requests: Sequence[Request], limit_s: float) -> list[Answer]:
    """Send every request when it is due; `limit_s` bounds each answer."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, started_s + request.at_s - loop.time()))
            tasks.append(group.create_task(send(target, request, started_s, limit_s)))
    return [task.result() for task in tasks]


async def in_turn(target: Target, requests: Sequence[Request], limit_s: float) -> list[Answer]:
    """Send one request after the other; each is due when the one before has ended."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    answers = []
    for request in requests:
        due = replace(request, at_s=loop.time() - started_s)
        answers.append(await send(target, due, started_s, limit_s))
    return answers


@dataclass(frozen=True, slots=True)
class Summary:
    """What a load amounted to. Times in seconds, over the answers without a fault."""

    num_answers: int
    num_faults: int
    num_prompt_tokens: int
    num_tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float


def summarise(answers: Sequence[Answer]) -> Summary:
    """Totals and percentiles; `wall_s` runs from the first due time to the last event."""
    good = [a for a in answers if a.fault is None]
    ends = [a.last_s for a in good if a.last_s is not None]
    wall_s = max(ends) - min(a.at_s for a in answers) if ends else math.nan
    num_tokens = sum(a.num_tokens for a in good)
    return Summary(
        num_answers=len(good),
        num_faults=len(answers) - len(good),
        num_prompt_tokens=sum(a.num_prompt_tokens for a in good),
        num_tokens=num_tokens,
        wall_s=wall_s,
        tokens_per_s=num_tokens / wall_s if ends and wall_s > 0 else math.nan,
        ttft_p50_s=percentile([a.ttft_s for a in good], 50),
        ttft_p99_s=percentile([a.ttft_s for a in good], 99),
        tpot_p50_s=percentile([a.tpot_s for a in good if a.num_tokens > 1], 50),
    )


def insist(answers: Sequence[Answer], what: str) -> list[Answer]:
    """The answers, if all of them are right. Raises BenchFault naming the first wrong one."""
    wrong = [a for a in answers if a.fault is not None]
    if wrong:
        raise BenchFault(f"{what}: {len(wrong)} of {len(answers)} answers are wrong, first: {wrong[0].fault}")
    return list(answers)


def percentile(values: Sequence[float], rank: float) -> float:
    """The nearest-rank percentile (a value that was measured), NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(rank / 100 * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    """The median, NaN of nothing."""
    return statistics.median(values) if values else math.nan
