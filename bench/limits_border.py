"""Part of `bench limits`: two hundred calls at once, at two gateways, where a window ends.

Limits look back over slots of five seconds by the clock of the control Redis. Half the calls are sent just
before such a border and half just after it, to both gateways alike; each round with a new key. Prompts are
token ids and answers have their full length, so that what is reserved is what is used: what passes beyond
a limit is the doing of gateways that count at once, not of estimates.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from antiphon.core.grant import Grant, Limits
from antiphon.core.metering import SLOT_S
from bench import commands
from bench.client import Answer, Request, send
from bench.commands import NO_TIERS, Shape
from bench.crowd import Caller, make_callers
from bench.errors import BenchFault
from bench.metrics import linked
from bench.pairs import progress
from bench.redisserver import redis_server
from bench.report import Figure, Value, figure
from bench.servers import running

_MODEL = "babble"
_CATALOGUE = """[[model]]
name = "babble"
engine = "scripted"
script = "babble"
context = 1024
"""
_LIMIT_S = 30.0
_REDIS_MIB = 64
_BEFORE_S = 0.06  # how long before the border the first calls leave
_WARM_UP_S = 2.5  # gateways greet each other every two seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderSettings:
    """Sizes of this part."""

    num_rounds: int = 5  # of each limit
    num_calls: int = 200
    requests_per_minute: int = 60
    tokens_per_minute: int = 3000
    prompt_tokens: int = 40
    answer_tokens: int = 8

    @property
    def call_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Border:
    """What passed in each round."""

    settings: BorderSettings
    requests: Sequence[int]  # of a key with a limit on requests
    tokens: Sequence[int]  # of one with a limit on tokens

    def figures(self) -> list[Figure]:
        """Beyond the limits: nothing, and one request's estimate."""
        settings = self.settings
        return [
            figure(
                "rpm_overrun",
                max(0, max(self.requests) - settings.requests_per_minute),
                f"{settings.num_calls} calls at a border, two gateways: requests beyond the limit",
                "<= 0",
            ),
            figure(
                "tpm_overrun",
                max(0, max(self.tokens) - settings.tokens_per_minute) / settings.call_tokens,
                "the same: tokens beyond the limit ÷ one call's",
                "<= 1.0",
            ),
        ]

    def rows(self) -> dict[str, dict[str, Value]]:
        """For the table."""
        settings = self.settings
        return {
            "at a border: requests": _row(settings.requests_per_minute, self.requests),
            "at a border: tokens": _row(settings.tokens_per_minute, self.tokens),
        }


def _row(limit: int, passed: Sequence[int]) -> dict[str, Value]:
    return {
        "limit": limit,
        "rounds": len(passed),
        "least that passed": min(passed),
        "most that passed": max(passed),
    }


async def measure(settings: BorderSettings) -> Border:
    """All rounds."""
    by_requests = Grant(limits=Limits(requests_per_minute=settings.requests_per_minute))
    by_tokens = Grant(limits=Limits(tokens_per_minute=settings.tokens_per_minute))
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(redis_server(_REDIS_MIB))
        fleet = stack.enter_context(commands.fleet(_MODEL, catalogue=_CATALOGUE))
        wanted = [("acme", grant) for grant in (by_requests, by_tokens) for _ in range(settings.num_rounds)]
        callers = await make_callers(fleet.database, wanted)
        worker = fleet.worker(Shape(num_streams=64, context_tokens=1024, threads=None), tiers=NO_TIERS)
        await stack.enter_async_context(running(worker))
        made = [fleet.gateway(worker, control_redis=control.url) for _ in range(2)]
        gateways = [await stack.enter_async_context(running(command)) for command in made]
        for gateway in gateways:
            await linked(gateway)
        await asyncio.sleep(_WARM_UP_S)
        passed = [await _burst(settings, caller, [g.url for g in gateways]) for caller in callers]
    return Border(
        settings,
        [num for num, _ in passed[: settings.num_rounds]],
        [t for _, t in passed[settings.num_rounds :]],
    )


async def _burst(settings: BorderSettings, caller: Caller, urls: Sequence[str]) -> tuple[int, int]:
    """Requests and tokens that pass. Raises BenchFault where something else than the limit stops one."""
    started_s = asyncio.get_running_loop().time()
    draw = random.Random(caller.key_id)

    async def call(number: int) -> Answer:
        await asyncio.sleep(0.0 if number < settings.num_calls // 2 else 2 * _BEFORE_S)
        target = caller.at(urls[number % len(urls)])
        return await send(target, _request(settings, draw), started_s, _LIMIT_S)

    await asyncio.sleep((-time.time() - _BEFORE_S) % SLOT_S)
    answers = await asyncio.gather(*(call(number) for number in range(settings.num_calls)))
    wrong = [answer for answer in answers if answer.fault is not None and answer.status != 429]
    if wrong:
        raise BenchFault(f"{len(wrong)} calls failed, first: {wrong[0].fault}")
    good = [answer for answer in answers if answer.fault is None]
    num_tokens = sum(answer.num_prompt_tokens + answer.num_tokens for answer in good)
    progress(f"{len(good)} of {settings.num_calls} calls passed, {num_tokens} tokens")
    return len(good), num_tokens


def _request(settings: BorderSettings, draw: random.Random) -> Request:
    prompt = [draw.randrange(97, 123) for _ in range(settings.prompt_tokens)]
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": settings.answer_tokens, "temperature": 0}
    return Request(0.0, "/v1/completions", msgspec.json.encode(body), settings.answer_tokens)
