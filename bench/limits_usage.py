"""Part of `bench limits`: the books against what clients got; clients leave, workers and a gateway die.

Two gateways share a database; one of them is killed with what it answers just then, and comes back.
Requests differ in kind: streamed or whole, one or several choices, chats and completions; clients of some
hang up in mid-answer. The script says one letter a token and never ends, so what a client read can be
counted. Each row is compared with its client's count, by the response's request id.

A client that hung up may have had tokens on the wire that it did not read: its row may hold more, never
less. Of the killed gateway's requests the books hold what was noted last; they must be marked.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from antiphon.core.grant import FULL_GRANT
from antiphon.store.database import Database
from antiphon.store.usage import LOST
from antiphon.store.usagereport import UsageRecord, UsageReport, Wanted
from bench import commands
from bench.client import LEFT, Answer, Request, send
from bench.commands import NO_TIERS, Shape
from bench.crowd import Caller, make_callers, text
from bench.metrics import linked
from bench.mortal import Mortal
from bench.pairs import progress
from bench.report import Figure, Value, figure

MODEL = "babble"
CATALOGUE = """[[model]]
name = "babble"
engine = "scripted"
script = "babble"
context = 1024
step_s = 0.001
"""
_LIMIT_S = 60.0
_SWEPT_S = 120.0  # a gateway is taken for dead after a minute
_POLL_S = 2.0
_AGAIN_S = 0.25
_MOST_TRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSettings:
    """Sizes of this part."""

    num_requests: int = 10_000
    num_at_once: int = 32
    num_workers: int = 2
    num_worker_kills: int = 6
    gateway_dies_at: float = 0.05  # of the requests
    answer_tokens: tuple[int, int] = (1, 48)
    prompt_tokens: tuple[int, int] = (1, 200)


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Said | None = None
    message: _Said | None = None

    @property
    def num_tokens(self) -> int:
        said = self.delta or self.message
        return len(self.text or (said.content if said is not None else None) or "")


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


@dataclass(frozen=True, slots=True)
class Got:
    """What a client knows of its request."""

    request_id: str  # empty: no response came
    status: int
    fault: str | None
    num_tokens: int
    is_of_killed: bool  # a gateway was killed under it

    @classmethod
    def of(cls, answer: Answer, *, is_of_killed: bool) -> Got:
        """Counted in what it read."""
        events = (msgspec.json.decode(event, type=_Event) for event in answer.events)
        num_tokens = sum(choice.num_tokens for event in events for choice in event.choices)
        request_id = answer.headers.get(b"x-request-id", b"").decode()
        return cls(request_id, answer.status, answer.fault, num_tokens, is_of_killed)


@dataclass(frozen=True, slots=True)
class Books:
    """What clients got, and the rows."""

    got: Sequence[Got]
    rows: dict[str, UsageRecord]

    def is_lost(self, one: Got) -> bool:
        """Whether the end of its row was not written before its gateway was killed."""
        return one.request_id in self.rows and self.rows[one.request_id].outcome == LOST

    @property
    def ended_well(self) -> list[Got]:
        return [one for one in self.got if one.fault is None and not self.is_lost(one)]

    @property
    def left(self) -> list[Got]:
        return [one for one in self.got if one.fault == LEFT and not self.is_lost(one)]

    @property
    def broken(self) -> list[Got]:
        """Begun, not ended, though the client waited: not those of the killed gateway."""
        return [
            one
            for one in self.got
            if one.fault not in (None, LEFT) and one.status == 200 and not one.is_of_killed
        ]

    @property
    def missing(self) -> list[Got]:
        """Answered, without a row."""
        return [one for one in self.got if one.status == 200 and one.request_id not in self.rows]

    def booked(self, of: Sequence[Got]) -> int:
        """Answer tokens in the rows of these."""
        return sum(self.rows[one.request_id].answer_tokens for one in of if one.request_id in self.rows)

    def num_wrong(self, of: Sequence[Got]) -> int:
        """Rows that do not say what the client got."""
        rows = [(one, self.rows[one.request_id]) for one in of if one.request_id in self.rows]
        return sum(row.answer_tokens != one.num_tokens for one, row in rows)

    def num_short(self, of: Sequence[Got]) -> int:
        """Rows that say less than the client got."""
        rows = [(one, self.rows[one.request_id]) for one in of if one.request_id in self.rows]
        return sum(row.answer_tokens < one.num_tokens for one, row in rows)

    @property
    def lost(self) -> list[UsageRecord]:
        return [row for row in self.rows.values() if row.outcome == LOST]

    def figures(self) -> list[Figure]:
        """What has to be nought, and how much hung-up clients did not read."""
        tokens = sum(one.num_tokens for one in self.ended_well)
        left_tokens = sum(one.num_tokens for one in self.left)
        return [
            figure(
                "usage_off",
                abs(self.booked(self.ended_well) - tokens),
                f"answer tokens in the books less those that {len(self.ended_well):,} clients got",
                "<= 0",
            ),
            figure(
                "usage_rows_wrong",
                self.num_wrong(self.ended_well) + self.num_wrong(self.broken) + self.num_short(self.left),
                "rows that differ from what the client got; where it hung up: that say less",
                "<= 0",
            ),
            figure("usage_rows_missing", len(self.missing), "answers without a row", "<= 0"),
            figure(
                "usage_rows_open",
                sum(
                    row.closed_at is None or (row.outcome == LOST and not row.is_estimated)
                    for row in self.rows.values()
                ),
                "rows that never ended, or that a killed gateway left and that are not marked",
                "<= 0",
            ),
            figure(
                "usage_unread",
                (self.booked(self.left) - left_tokens) / max(left_tokens, 1),
                "tokens booked that clients who hung up had not read ÷ those that they had",
            ),
        ]

    def row(self) -> dict[str, Value]:
        """For the table."""
        return {
            "requests, with those sent again": len(self.got),
            "ended well": len(self.ended_well),
            "hung up": len(self.left),
            "broken off": len(self.broken),
            "refused": sum(one.status not in (0, 200) for one in self.got),
            "of the killed gateway": sum(
                one.is_of_killed and one.fault not in (None, LEFT) for one in self.got
            ),
            "rows": len(self.rows),
            "rows marked lost": len(self.lost),
            "answer tokens that those lack": sum(one.num_tokens for one in self.got if self.is_lost(one)),
            "answer tokens booked": sum(row.answer_tokens for row in self.rows.values()),
        }


async def measure(settings: UsageSettings) -> Books:
    """All requests, and the rows when every one has ended."""
    async with AsyncExitStack() as stack:
        fleet = stack.enter_context(commands.fleet(MODEL, catalogue=CATALOGUE))
        (caller,) = await make_callers(fleet.database, [("acme", FULL_GRANT)])
        shape = Shape(num_streams=settings.num_at_once, context_tokens=1024, threads=None)
        made = [fleet.worker(shape, tiers=NO_TIERS) for _ in range(settings.num_workers)]
        workers = [await stack.enter_async_context(Mortal.living(command)) for command in made]
        fronts = [fleet.gateway(*made), fleet.gateway(*made)]
        gateways = [await stack.enter_async_context(Mortal.living(command)) for command in fronts]
        for gateway in gateways:
            await linked(gateway.server, settings.num_workers)
        got = await _Clients(settings, caller, workers, gateways).run()
        return Books(got, await _rows(fleet.database))


class _Clients:
    """Those who ask, and what is done to the servers meanwhile."""

    def __init__(
        self, settings: UsageSettings, caller: Caller, workers: Sequence[Mortal], gateways: Sequence[Mortal]
    ) -> None:
        self._settings = settings
        self._caller = caller
        self._workers = workers
        self._gateways = gateways
        self._killed_s: float | None = None  # the first gateway was
        self._got: list[Got] = []
        self._num_done = 0
        self._deaths: list[asyncio.Task[None]] = []

    async def run(self) -> list[Got]:
        """All requests, so many at once; deaths by how many are done."""
        settings = self._settings
        numbers = iter(range(settings.num_requests))
        lanes = [asyncio.create_task(self._lane(numbers)) for _ in range(settings.num_at_once)]
        await asyncio.gather(*lanes)
        await asyncio.gather(*self._deaths)
        return self._got

    def _one_more(self) -> None:
        """One more has ended; whoever is due to die now does."""
        self._num_done += 1
        settings, num_done = self._settings, self._num_done
        if num_done == round(settings.gateway_dies_at * settings.num_requests):
            self._killed_s = asyncio.get_running_loop().time()
            self._deaths.append(asyncio.create_task(self._gateways[0].kill()))
        if num_done % (settings.num_requests // (settings.num_worker_kills + 1)) == 0:
            victim = self._workers[len(self._deaths) % len(self._workers)]
            self._deaths.append(asyncio.create_task(victim.kill()))
            progress(f"{num_done} requests")

    async def _lane(self, numbers: Iterator[int]) -> None:
        loop = asyncio.get_running_loop()
        for number in numbers:
            gateway = self._gateways[number % len(self._gateways)]
            request = _request(self._settings, number)
            for _ in range(_MOST_TRIES):
                sent_s = loop.time()
                answer = await send(self._caller.at(gateway.server.url), request, sent_s, _LIMIT_S)
                is_under = self._killed_s is not None and sent_s <= self._killed_s <= sent_s + answer.ended_s
                is_of_killed = gateway is self._gateways[0] and is_under
                self._got.append(Got.of(answer, is_of_killed=is_of_killed))
                if answer.status not in (0, 429, 503):
                    break
                await asyncio.sleep(_AGAIN_S)
            self._one_more()


def _request(settings: UsageSettings, number: int) -> Request:
    """Of one of many kinds, by its number."""
    draw = random.Random(number)
    is_chat, is_stream = draw.random() < 0.7, draw.random() < 0.6
    num_choices = draw.choice((1, 1, 1, 2, 3))
    asked = text(draw, draw.randint(*settings.prompt_tokens))
    body: dict[str, object] = {
        "model": MODEL,
        "max_tokens": draw.randint(*settings.answer_tokens),
        "n": num_choices,
        "temperature": 0,
    }
    body |= {"messages": [{"role": "user", "content": asked}]} if is_chat else {"prompt": asked}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": draw.random() < 0.5}}
    leaves_after = draw.randint(1, 20) if is_stream and draw.random() < 0.2 else None
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Request(0.0, path, msgspec.json.encode(body), keeps_events=True, leaves_after=leaves_after)


async def _rows(url: str) -> dict[str, UsageRecord]:
    """All rows, once every one has ended, or nobody will end them any more."""
    database = await Database.open(url)
    until_s = time.monotonic() + _SWEPT_S
    try:
        while True:
            report = UsageReport(database)
            rows = {row.id: row async for page in report.records(Wanted()) for row in page}
            is_done = all(row.closed_at is not None for row in rows.values())
            if is_done or time.monotonic() > until_s:
                return rows
            progress(f"{sum(row.closed_at is None for row in rows.values())} rows are open")
            await asyncio.sleep(_POLL_S)
    finally:
        await database.close()
