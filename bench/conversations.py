"""Chats of several turns: what their users say, how they are asked, what came back token by token.

User turns are random words, answers are greedy and of exact length (end-of-turn tokens are barred up to
it), so that prompts grow by a known number of tokens. A chat remembers its answers: its next request
holds them as history. Two answers to the same request are compared token by token: KV that was computed
in another batch shape may tip a near-tie, wrong KV moves log probabilities by several nats.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from bench.client import Answer, Request, Target, send
from bench.load import Vocabulary, insist

NEAR_TIE = 0.5  # nats between the two tokens, as in the test of greedy text
_NUM_TOP = 5
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Tokens of a chat: its first user turn, the least and most of a later one, every answer."""

    first: int
    later: tuple[int, int] = (20, 60)
    answer: int = 24


@dataclass(slots=True)
class Chat:
    """One conversation. `answers` holds as many as there were turns."""

    user_turns: list[str]
    answer_tokens: int
    answers: list[str] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: str, num_turns: int, growth: Growth) -> Chat:
        """A chat with random user turns."""
        draw, vocabulary = random.Random(seed), Vocabulary()
        lengths = [growth.first, *(draw.randint(*growth.later) for _ in range(num_turns - 1))]
        return cls([vocabulary.text(draw, length).strip() for length in lengths], growth.answer)

    def request(self, model: str) -> Request:
        """The next turn, with all that was said before."""
        messages = [{"role": "user", "content": self.user_turns[0]}]
        for answer, user in zip(self.answers, self.user_turns[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": user}]
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": self.answer_tokens,
            "min_tokens": self.answer_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": _NUM_TOP,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Request(
            0.0, "/v1/chat/completions", msgspec.json.encode(body), self.answer_tokens, keeps_events=True
        )


class Scored(NamedTuple):
    """A token of an answer, its log probability, and those of the best ones."""

    token: str
    logprob: float
    top: dict[str, float]


class Difference(NamedTuple):
    """Where two answers part, and the larger of both sides' gaps between the two tokens, in nats."""

    position: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn's answer."""

    answer: Answer
    text: str
    tokens: list[Scored]

    @property
    def num_computable(self) -> int:
        """Tokens whose KV its worker had at the end: all but the last one, which was never put in."""
        return self.answer.num_prompt_tokens + self.answer.num_tokens - 1


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


async def ask(target: Target, request: Request) -> Reply:
    """One turn, due now. Raises BenchFault where the answer is wrong."""
    now_s = asyncio.get_running_loop().time()
    (answer,) = insist([await send(target, request, now_s, _LIMIT_S)], target.url)
    return read(answer)


def read(answer: Answer) -> Reply:
    """The text and the tokens of an answer whose events were kept."""
    text: list[str] = []
    tokens: list[Scored] = []
    for data in answer.events:
        for choice in msgspec.json.decode(data, type=_Event).choices:
            text.append(choice.delta.content or "")
            for t in (choice.logprobs and choice.logprobs.content) or []:
                tokens.append(Scored(t.token, t.logprob, {top.token: top.logprob for top in t.top_logprobs}))
    return Reply(answer, "".join(text), tokens)


def difference(one: Sequence[Scored], other: Sequence[Scored]) -> Difference | None:
    """Where two answers to the same request part; None where they do not."""
    for position, (a, b) in enumerate(itertools.zip_longest(one, other)):
        if a is None or b is None:
            return Difference(position, math.inf)
        if a.token != b.token:
            return Difference(position, max(_gap(a, b.token), _gap(b, a.token)))
    return None


def _gap(chosen: Scored, rival: str) -> float:
    return chosen.logprob - chosen.top.get(rival, -math.inf)
