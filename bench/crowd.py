"""Who asks in `bench overload` and `bench limits`: tenants with keys, requests of mixed sizes, arrivals.

An open load sends every request when it is due. A closed one keeps as many in flight as there are lanes.
Either may stand behind a `Line`, a front that refuses nobody: what a plain first-come queue makes of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from antiphon.core.generation import Priority
from antiphon.core.grant import FULL_GRANT, Grant
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore
from bench.client import Answer, Request, Target, send

CLASSES = (Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH)
_LETTERS = "etaoin shrdlu"
_REFUSED_S = 0.1  # a lane whose request was refused asks again after so long


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `key`: as the client sends it."""

    tenant: str
    key_id: str
    key: str
    grant: Grant = FULL_GRANT

    def at(self, url: str) -> Target:
        """Where it sends requests, and with what."""
        return Target(url, (("authorization", f"Bearer {self.key}"),))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens (bytes) of prompts and of answers: small ones are as frequent as large ones, by magnitude."""

    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]

    def request(self, draw: random.Random, model: str, at_s: float = 0.0) -> Request:
        """One streamed chat that shares nothing with any other."""
        num_tokens = _between(draw, *self.answer_tokens)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text(draw, _between(draw, *self.prompt_tokens))}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Request(at_s, "/v1/chat/completions", msgspec.json.encode(body), num_tokens)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and whose it is."""

    caller: Caller
    request: Request


@dataclass(frozen=True, slots=True)
class Told:
    """An arrival and what came back."""

    caller: Caller
    answer: Answer
    lag_s: float = 0.0  # how late the load itself was

    @property
    def is_admitted(self) -> bool:
        return self.answer.status == 200

    @property
    def is_refused(self) -> bool:
        """Told to come again."""
        return self.answer.status in (429, 503)

    @property
    def work(self) -> int:
        """Tokens that were computed for it, as the server counts them."""
        return self.answer.num_prompt_tokens + self.answer.num_tokens


async def make_callers(database: str, wanted: Sequence[tuple[str, Grant]]) -> list[Caller]:
    """A new key for each tenant and grant."""
    opened = await Database.open(database)
    try:
        keys = KeyStore(opened)
        made = []
        for tenant, grant in wanted:
            key, told = await keys.create(tenant, f"{tenant} {grant.priority.name.lower()}", grant)
            made.append(Caller(tenant, key.id, told, grant))
        return made
    finally:
        await opened.close()


def arrivals(
    draw: random.Random,
    model: str,
    sizes: Sizes,
    callers: Sequence[tuple[Caller, float]],
    parts: Sequence[tuple[float, float]],
) -> list[Arrival]:
    """Poisson arrivals, at each rate for its seconds, each of a caller by its share."""
    named, shares = [caller for caller, _ in callers], [share for _, share in callers]
    made = []
    from_s = 0.0
    for per_s, seconds in parts:
        at_s = from_s + draw.expovariate(per_s)
        from_s += seconds
        while at_s < from_s:
            (caller,) = draw.choices(named, shares)
            made.append(Arrival(caller, sizes.request(draw, model, at_s)))
            at_s += draw.expovariate(per_s)
    return made


class Line:
    """A front that lets so many requests through at once, first come first served, and refuses nobody."""

    def __init__(self, num_at_once: int) -> None:
        self._places = asyncio.Semaphore(num_at_once)

    async def send(self, target: Target, request: Request, started_s: float, limit_s: float) -> Answer:
        """As `client.send`; the wait for a place counts."""
        loop = asyncio.get_running_loop()
        left_s = started_s + request.at_s + limit_s
        try:
            async with asyncio.timeout_at(left_s):
                await self._places.acquire()
        except TimeoutError:
            return Answer(request.at_s, fault="gave up in the line", ended_s=loop.time() - started_s)
        try:
            return await send(target, request, started_s, max(0.0, left_s - loop.time()))
        finally:
            self._places.release()


async def open_crowd(
    url: str, crowd: Sequence[Arrival], limit_s: float, line: Line | None = None
) -> list[Told]:
    """Send each request when it is due; `limit_s` is its client's patience."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    sending = send if line is None else line.send

    async def told(arrival: Arrival) -> Told:
        lag_s = loop.time() - started_s - arrival.request.at_s
        answer = await sending(arrival.caller.at(url), arrival.request, started_s, limit_s)
        return Told(arrival.caller, answer, lag_s)

    tasks = []
    async with asyncio.TaskGroup() as group:
        for arrival in crowd:
            await asyncio.sleep(max(0.0, started_s + arrival.request.at_s - loop.time()))
            tasks.append(group.create_task(told(arrival)))
    return [task.result() for task in tasks]


async def closed_crowd(
    url: str, lanes: Sequence[Sequence[Arrival]], seconds: float, limit_s: float
) -> list[Told]:
    """A request of each lane in flight, one after the other, until the time is over."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    async def run(lane: Sequence[Arrival]) -> list[Told]:
        told: list[Told] = []
        for arrival in lane:
            at_s = loop.time() - started_s
            if at_s > seconds:
                break
            due = replace(arrival.request, at_s=at_s)
            told.append(Told(arrival.caller, await send(arrival.caller.at(url), due, started_s, limit_s)))
            if told[-1].is_refused:
                await asyncio.sleep(_REFUSED_S)
        return told

    return [told for lane in await asyncio.gather(*map(run, lanes)) for told in lane]


def text(draw: random.Random, num_tokens: int) -> str:
    """Letters, a token each for models that read bytes."""
    return "".join(draw.choices(_LETTERS, k=num_tokens))


def _between(draw: random.Random, least: int, most: int) -> int:
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))
