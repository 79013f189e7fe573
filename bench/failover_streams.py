"""The streams of `bench failover`: what is asked, what was said and when, where two of them part."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from bench.client import Answer, Request

_WORDS = ("the", "sea", "was", "calm", "and", "the", "lamp", "burned", "low", "while", "we", "waited")
_PAUSE_STARTS_S = 0.25  # a pause that a fault made begins at most so long after it


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Scored(msgspec.Struct):
    token: str
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Scored] = []


@dataclass(frozen=True, slots=True)
class Spec:
    """One request, the same each time it is made."""

    name: str
    fields: dict[str, object]

    @classmethod
    def of(cls, stream: int, number: int, num_tokens: int) -> Spec:
        """Of one of four kinds, by turns."""
        fields: dict[str, object] = {
            "temperature": 1.0,
            "max_tokens": num_tokens,
            "seed": 100 * stream + number,
        }
        kind = stream % 4
        if kind == 0:
            fields |= {"frequency_penalty": 0.8, "presence_penalty": 0.5}
        elif kind == 1:
            fields |= {"logprobs": True, "top_logprobs": 3}
        elif kind == 2:
            fields |= {"n": 2, "frequency_penalty": 0.3}
        else:
            fields |= {"stop": ["~~~~", "etaoin", "zq"]}
        return cls(f"stream {stream} number {number}", fields)

    @classmethod
    def greedy(cls, stream: int, num_tokens: int) -> Spec:
        """For a real model: what it says depends on nothing but its weights, ties aside."""
        scores = {"logprobs": True, "top_logprobs": 2}
        return cls(f"story {stream}", {"temperature": 0.0, "max_tokens": num_tokens, **scores})

    def request(self, model: str, label: str) -> Request:
        """Under this label it finds no KV of what ran under another one."""
        place = sum(map(ord, self.name)) % len(_WORDS)
        text = f"{self.name}: {' '.join((*_WORDS[place:], *_WORDS[:place]))}. Go on."
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": label,
            **self.fields,
        }
        return Request(0.0, "/v1/chat/completions", json.dumps(body).encode(), keeps_events=True)


@dataclass(slots=True)
class Said:
    """What a stream said. Two are equal if nothing but the time of it differs."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, bytes] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0
    token_s: dict[int, list[float]] = field(default_factory=dict, compare=False)


def read(answer: Answer) -> Said:
    """What an answer's events say."""
    said = Said(num_tokens=answer.num_tokens)
    for data, at_s in zip(answer.events, answer.event_s, strict=False):
        for choice in msgspec.json.decode(data, type=_Event).choices:
            index = choice.index
            if choice.delta.content:
                said.texts[index] = said.texts.get(index, "") + choice.delta.content
                said.token_s.setdefault(index, []).append(at_s)
            if bytes(choice.logprobs) != b"null":
                said.logprobs[index] = said.logprobs.get(index, b"") + bytes(choice.logprobs) + b"\n"
            if choice.finish_reason is not None:
                said.finishes[index] = choice.finish_reason
    return said


def pauses(streams: Sequence[Said], fault_s: float) -> list[float]:
    """Of each choice that was being said at a fault: seconds from it to the end of its longest pause then."""
    found = []
    for said in streams:
        for times in said.token_s.values():
            around = [
                (after - before, after - fault_s)
                for before, after in itertools.pairwise(times)
                if after > fault_s and before < fault_s + _PAUSE_STARTS_S
            ]
            if around and times[0] < fault_s:
                found.append(max(around)[1])
    return sorted(found, reverse=True)


def margin_at(said: Said, calm: Said) -> float | None:
    """How far apart the two best tokens were where two texts part, in nats; None where they do not."""
    if said.texts == calm.texts:
        return None
    ours, theirs = _scored(said), _scored(calm)
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.token != b.token), None)
    if place is None or len(theirs[place].top_logprobs) < 2:
        return float("inf")
    best, second = theirs[place].top_logprobs[:2]
    return abs(best.logprob - second.logprob)


def _scored(said: Said) -> list[_Scored]:
    lines = said.logprobs.get(0, b"").splitlines()
    return [token for line in lines for token in msgspec.json.decode(line, type=_Logprobs).content]
