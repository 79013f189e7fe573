"""Part of `bench limits`: CPU that a gateway spends on a request's limits, admission and books.

End to end: the same small requests without a key, with a key without limits, and with a key that has every
limit there is, in turns, at one gateway; what counts is the CPU time of its process. Admission and books
cannot be left out of a gateway: they are measured in this process, the product's own parts, admission at a
model with room and books in an SQLite database of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from antiphon.core.clock import WallClock
from antiphon.core.generation import Terminal
from antiphon.core.grant import FULL_GRANT, Grant, Limits
from antiphon.gateway.account import Account
from antiphon.gateway.admission import Admission
from antiphon.gateway.callers import LOCAL
from antiphon.gateway.course import Prepared, Source, Work
from antiphon.gateway.schema import ChatRequest
from antiphon.gateway.text import Piece
from antiphon.gateway.usagebook import UsageBook
from antiphon.obs.log import configure_logging
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router.admission import QueueBounds
from antiphon.router.places import Places
from antiphon.router.room import Room
from antiphon.store.database import Database
from antiphon.store.usage import UsageStore
from bench import commands
from bench.client import Request, Target, send
from bench.commands import NO_TIERS, Shape
from bench.crowd import make_callers
from bench.errors import BenchFault
from bench.load import insist, median
from bench.metrics import linked
from bench.pairs import progress
from bench.redisserver import redis_server
from bench.report import Figure, Value, figure, rounded
from bench.servers import Server, running

_MODEL = "scripted"
_HUGE = 10**12
_EVERY_LIMIT = Limits(
    requests_per_minute=_HUGE,
    tokens_per_minute=_HUGE,
    max_concurrent=_HUGE,
    tokens_per_day=_HUGE,
    tokens_per_month=_HUGE,
)
_BODY = msgspec.json.encode(
    {"model": _MODEL, "messages": [{"role": "user", "content": "Hello, bench."}], "max_tokens": 8}
)
_LIMIT_S = 30.0
_REDIS_MIB = 64
KEYLESS, KEYED, LIMITED = "no key", "a key without limits", "a key with every limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Sizes of this part."""

    num_rounds: int = 12
    num_requests: int = 400  # of a side in a round
    num_lanes: int = 4
    num_own: int = 4000  # entries at the gate, and rows, in this process


@dataclass(slots=True)
class Costs:
    """CPU milliseconds a request."""

    sides: dict[str, list[float]] = field(default_factory=lambda: {KEYLESS: [], KEYED: [], LIMITED: []})
    admission_ms: float = 0.0
    usage_ms: float = 0.0

    def over(self, side: str, other: str) -> float:
        """The median over the rounds of what one side costs more than another."""
        pairs = zip(self.sides[side], self.sides[other], strict=True)
        return median([mine - theirs for mine, theirs in pairs])

    def figures(self) -> list[Figure]:
        """Limits and admission together have a goal; books are listed."""
        limits_ms = self.over(LIMITED, KEYLESS)
        return [
            figure(
                "cost_ms",
                limits_ms + self.admission_ms,
                "CPU ms a request for key, all limits and admission",
                "<= 0.3",
            ),
            figure("cost_limits_ms", limits_ms, "of it: a key with every limit, less no key"),
            figure("cost_admission_ms", self.admission_ms, "of it: admission where there is room"),
            figure(
                "cost_usage_ms", self.usage_ms, "CPU ms a request for its row of usage, database included"
            ),
        ]

    def rows(self) -> dict[str, dict[str, Value]]:
        """For the table."""
        return {
            f"CPU of the gateway: {side}": {
                "ms a request": rounded(median(costs)),
                "least ms": rounded(min(costs)),
                "most ms": rounded(max(costs)),
            }
            for side, costs in self.sides.items()
        }


async def measure(settings: CostSettings) -> Costs:
    """All of it."""
    costs = Costs()
    costs.admission_ms = await _admission_ms(settings.num_own)
    costs.usage_ms = await _usage_ms(settings.num_own)
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(redis_server(_REDIS_MIB))
        fleet = stack.enter_context(commands.fleet(_MODEL))
        wanted = [("plain", FULL_GRANT), ("bounded", Grant(limits=_EVERY_LIMIT))]
        plain, bounded = await make_callers(fleet.database, wanted)
        worker = fleet.worker(Shape(num_streams=16, context_tokens=1024, threads=None), tiers=NO_TIERS)
        await stack.enter_async_context(running(worker))
        command = fleet.gateway(worker, control_redis=control.url)
        gateway = await stack.enter_async_context(running(command))
        await linked(gateway)
        targets = {
            KEYLESS: Target(gateway.url),
            KEYED: plain.at(gateway.url),
            LIMITED: bounded.at(gateway.url),
        }
        for target in targets.values():  # warm
            await _cpu_ms(gateway, target, settings)
        for number in range(settings.num_rounds):
            order = list(targets)
            random.Random(number).shuffle(order)
            for side in order:
                costs.sides[side].append(await _cpu_ms(gateway, targets[side], settings))
            progress(f"round {number + 1}: " + str({side: rounded(c[-1]) for side, c in costs.sides.items()}))
    return costs


async def _cpu_ms(gateway: Server, target: Target, settings: CostSettings) -> float:
    """Of one request, on the mean of many."""
    request = Request(0.0, "/v1/chat/completions", _BODY, 8)
    started_s = asyncio.get_running_loop().time()

    async def lane() -> None:
        for _ in range(settings.num_requests // settings.num_lanes):
            insist([await send(target, request, started_s, _LIMIT_S)], "the gateway")

    before_s = gateway.cpu_s()
    await asyncio.gather(*(lane() for _ in range(settings.num_lanes)))
    return 1000 * (gateway.cpu_s() - before_s) / settings.num_requests


class _Roomy(Places):
    """Four workers with room for everybody."""

    def __init__(self) -> None:
        """Nobody reports."""

    def watch(self, on_news: Callable[[str], None]) -> None:
        """Nothing changes."""

    def is_served(self, model: str) -> bool:
        return True

    def rooms(self, model: str, num_running: int) -> Iterator[Room]:
        return (Room(8, 1000.0, 10_000.0) for _ in range(4))


class _Silent(Source):
    """An answer that is never read."""

    @property
    def fingerprint(self) -> str:
        return ""

    async def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        yield []

    def end(self, finish: Terminal) -> None:
        """It has ended."""


async def _admission_ms(num: int) -> float:
    """CPU of one pass through the gate, from the asking to the settling."""
    metrics = GatewayMetrics()
    gate = Admission(_Roomy(), QueueBounds(), metrics.admission, WallClock())
    source = _Silent()
    prepared = Prepared(Work(100, 50, 1), lambda: source)
    account = _account()
    began_s = time.process_time()
    for _ in range(num):
        entry = gate.enter(_MODEL, prepared, account, may_wait=True)
        await entry.source()
        entry.end(Terminal.STOP)
    return 1000 * (time.process_time() - began_s) / num


async def _usage_ms(num: int, num_at_once: int = 4) -> float:
    """CPU of one row, all threads of this process: opened, waited for, ended."""
    log = configure_logging(level="error")
    metrics = GatewayMetrics()
    request = msgspec.json.decode(_BODY, type=ChatRequest)
    with TemporaryDirectory(prefix="antiphon-bench-") as folder:
        database = await Database.open(f"sqlite:///{Path(folder) / 'usage.db'}")
        book = UsageBook(UsageStore(database), {}, metrics.usage, WallClock(), log)
        writing = asyncio.create_task(book.run())

        async def lane() -> None:
            for _ in range(num // num_at_once):
                account = _account()
                await book.open(request, account)
                if account.before_answer is None:
                    raise BenchFault("a row was not opened")
                await account.before_answer()
                account.count_tokens(8)
                account.close(log, metrics)

        began_s = time.process_time()
        await asyncio.gather(*(lane() for _ in range(num_at_once)))
        spent_s = time.process_time() - began_s
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await database.close()
    return 1000 * spent_s / num


def _account() -> Account:
    account = Account("POST", None)
    account.caller = LOCAL
    account.model = _MODEL
    return account
