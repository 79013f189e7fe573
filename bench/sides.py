"""The loads of `bench engine` and one server under them.

Loads (prompts of random words, answers of exact length, the same for both sides of a pair):
    turn  one stream, request after request
    full  Poisson arrivals at four times what the peer can serve: all streams taken
    open  Poisson arrivals at 70 % of what the peer can serve: TTFT as users would see it
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from bench.client import Request, Target
from bench.load import Summary, completions, in_turn, insist, open_load, poisson, summarise

_FULL_SHARE = 4.0
_OPEN_SHARE = 0.7
_LIMIT_S = 600.0  # of one answer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of every request."""

    prompt_tokens: int = 150
    answer_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Side:
    """One server under load. Raises BenchFault at the first wrong answer."""

    name: str
    model: str
    target: Target
    sizes: Sizes

    async def turn(self, seed: int, num: int) -> Summary:
        """`num` requests, one after the other."""
        draw = random.Random(f"turn {seed}")
        answers = await in_turn(self.target, self._requests(draw, [0.0] * num), _LIMIT_S)
        return summarise(insist(answers, self.name))

    async def full(self, seed: int, num: int, capacity_per_s: float) -> Summary:
        """`num` requests, faster than they can be served."""
        return await self._open(f"full {seed}", num, _FULL_SHARE * capacity_per_s)

    async def open(self, seed: int, num: int, capacity_per_s: float) -> Summary:
        """`num` requests at a rate that the peer can serve."""
        return await self._open(f"open {seed}", num, _OPEN_SHARE * capacity_per_s)

    async def _open(self, seed: str, num: int, per_s: float) -> Summary:
        draw = random.Random(seed)
        requests = self._requests(draw, poisson(draw, num, per_s))
        return summarise(insist(await open_load(self.target, requests, _LIMIT_S), self.name))

    def _requests(self, draw: random.Random, due_s: Sequence[float]) -> list[Request]:
        return completions(
            draw,
            due_s,
            model=self.model,
            prompt_tokens=self.sizes.prompt_tokens,
            answer_tokens=self.sizes.answer_tokens,
        )


async def served_model(target: Target) -> str:
    """The name of the model that an OpenAI endpoint serves."""
    async with httpx2.AsyncClient(trust_env=False, headers=list(target.headers)) as http:
        answer = (await http.get(target.url + "/v1/models")).raise_for_status().json()
    return str(answer["data"][0]["id"])
