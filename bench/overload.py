"""`bench overload`: twice as much is asked for as can be answered, and one tenant asks for nearly all of it.

Workers run the scripted model, whose steps take as long as a real one's would; gateway, admission, links
and scheduler are the product. Tenants with keys of all three classes send chats of mixed sizes. Capacity
is the most work (tokens of prompts and answers) a second whose first token came within its class's limit,
found by closed loads of several depths. Then open loads, Poisson, each request counted from the moment it
was due: 0.8 of capacity; twice capacity and, at once after it, half. Then a light tenant alone, and beside
one that sends ten times as much: together twice capacity and more.

The peer, in turns with ours, is a plain first-come front before the same workers, at a gateway of ours whose
queue is as long as it may be: it lets as many through at once as gave the capacity, refuses nobody and knows
no tenants. Clients of both give up after a while.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

from antiphon.core.generation import Priority
from antiphon.core.grant import Grant
from bench import commands
from bench.client import Request, send
from bench.commands import NO_TIERS, Shape
from bench.crowd import CLASSES, Caller, Line, Sizes, Told, arrivals, closed_crowd, make_callers, open_crowd
from bench.load import percentile
from bench.machine import describe
from bench.metrics import linked
from bench.overload_outcome import Goodput, Outcome
from bench.pairs import progress
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.servers import running

_MODEL = "live"
_CATALOGUE = """[[model]]
name = "live"
engine = "scripted"
script = "babble"
context = 4096
step_s = {step_s}
prefill_token_s = {prefill_token_s}
decode_row_s = {decode_row_s}
"""
_TENANTS = ("ant", "bee", "cat", "dog")
_LIGHT, _HEAVY = "light", "heavy"
_FLOOR_EVERY_S = 0.1
_NEVER_S = 3600  # the longest queue wait there is
_LANE_REQUESTS = 400  # more than a lane of a closed load can get answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench. Rates are shares of the capacity that was found."""

    num_workers: int = 4
    max_sequences: int = 16
    kv_tokens: int = 32_000  # of a worker
    step_s: float = 0.008
    prefill_token_s: float = 0.0002  # 5,000 prompt tokens a second
    decode_row_s: float = 0.0005
    prompt_tokens: tuple[int, int] = (64, 1024)
    answer_tokens: tuple[int, int] = (16, 96)
    class_shares: tuple[float, float, float] = (0.5, 0.3, 0.2)  # of interactive, default, batch
    ttft_limits_s: tuple[float, float, float] = (1.0, 2.0, 10.0)
    queue_wait_s: int = 3  # of an operator who promises quick answers; the default is for people who wait
    depths: tuple[int, ...] = (48, 64, 80)
    level_s: float = 16.0
    warm_s: float = 4.0  # of each load, not counted in its goodput
    normal_share: float = 0.8
    normal_s: float = 36.0
    over_share: float = 2.0
    over_s: float = 60.0
    after_share: float = 0.5
    after_s: float = 12.0
    light_share: float = 0.2
    times_as_much: float = 10.0
    light_s: float = 25.0
    line_s: float = 15.0  # of each load of the peer
    patience_s: float = 15.0

    @classmethod
    def quick(cls) -> Settings:
        return cls(
            depths=(64,), level_s=10.0, normal_s=10.0, over_s=12.0, after_s=8.0, light_s=10.0, line_s=8.0
        )

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.prompt_tokens, self.answer_tokens)

    @property
    def shape(self) -> Shape:
        return Shape(
            num_streams=self.max_sequences, context_tokens=4096, threads=None, kv_tokens=self.kv_tokens
        )

    @property
    def catalogue(self) -> str:
        return _CATALOGUE.format(
            step_s=self.step_s, prefill_token_s=self.prefill_token_s, decode_row_s=self.decode_row_s
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """The best closed load, and how many requests it had in flight."""

    goodput: Goodput
    depth: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All loads of a run."""

    levels: Sequence[Outcome]
    capacity: Capacity
    normal: Outcome
    over: Outcome
    floor_s: Sequence[float]  # meanwhile: requests that are refused for a mistake in them
    after: Outcome  # what was due once the load had dropped
    line_over: Outcome
    alone: Outcome
    flooded: Outcome  # the light tenant's part
    line_flooded: Outcome


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """All loads, on one gateway and its workers."""
    async with _fleet(settings) as bench:
        measured = await bench.measure()
    return Run(
        bench="overload",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={name: _shown(value) for name, value in asdict(settings).items()},
        figures=figures_of(settings, measured),
        raw=_raw(measured),
    )


@asynccontextmanager
async def _fleet(settings: Settings) -> AsyncIterator[OverloadBench]:
    """Fresh workers, and a gateway that has keys."""
    async with AsyncExitStack() as stack:
        fleet = stack.enter_context(commands.fleet(_MODEL, catalogue=settings.catalogue))
        wanted = [(name, Grant(priority=priority)) for name in _TENANTS for priority in CLASSES]
        wanted += [(name, Grant(priority=Priority.INTERACTIVE)) for name in (_LIGHT, _HEAVY)]
        callers = await make_callers(fleet.database, wanted)
        made = [fleet.worker(settings.shape, tiers=NO_TIERS) for _ in range(settings.num_workers)]
        for command in made:
            await stack.enter_async_context(running(command))
        gateway = await stack.enter_async_context(
            running(fleet.gateway(*made, queue_wait_s=settings.queue_wait_s))
        )
        patient = await stack.enter_async_context(running(fleet.gateway(*made, queue_wait_s=_NEVER_S)))
        for server in (gateway, patient):
            await linked(server, settings.num_workers)
        yield OverloadBench(settings, gateway.url, patient.url, callers)


class OverloadBench:
    """One gateway with its workers, under one load after the other."""

    def __init__(self, settings: Settings, url: str, patient_url: str, callers: Sequence[Caller]) -> None:
        self._settings = settings
        self._url = url
        self._patient_url = patient_url  # of the gateway behind the line
        self._mixed = [
            (caller, settings.class_shares[caller.grant.priority])
            for caller in callers
            if caller.tenant in _TENANTS
        ]
        by_tenant = {caller.tenant: caller for caller in callers}
        self._light, self._heavy = by_tenant[_LIGHT], by_tenant[_HEAVY]

    async def measure(self) -> Measured:
        """Everything."""
        settings = self._settings
        levels = [await self._closed(depth) for depth in settings.depths]
        best = max(range(len(levels)), key=lambda number: levels[number].goodput.work_per_s)
        capacity = Capacity(levels[best].goodput, settings.depths[best])
        progress(f"capacity: {capacity}")
        per_s = capacity.goodput.requests_per_s
        normal_per_s, over_per_s = settings.normal_share * per_s, settings.over_share * per_s
        normal = await self._open("0.8 of capacity", self._mixed, [(normal_per_s, settings.normal_s)])
        rush = [(over_per_s, settings.over_s), (settings.after_share * per_s, settings.after_s)]
        floor = asyncio.create_task(self._floor(settings.over_s))
        over = await self._open("twice capacity", self._mixed, rush)
        rush = [(over_per_s, settings.line_s)]
        line_over = await self._open("twice capacity, in line", self._mixed, rush, Line(capacity.depth))
        light_per_s = settings.light_share * per_s
        flood_per_s = light_per_s * (1 + settings.times_as_much)
        both = [(self._light, 1.0), (self._heavy, settings.times_as_much)]
        alone = await self._open("light alone", both[:1], [(light_per_s, settings.light_s)])
        flooded = await self._open("light and heavy", both, [(flood_per_s, settings.light_s)])
        line_flooded = await self._open(
            "light and heavy, in line", both, [(flood_per_s, settings.line_s)], Line(capacity.depth)
        )
        return Measured(
            levels=levels,
            capacity=capacity,
            normal=normal,
            over=over.due(0.0, settings.over_s),
            floor_s=await floor,
            after=over.due(settings.over_s, settings.over_s + settings.after_s),
            line_over=line_over,
            alone=alone,
            flooded=flooded,
            line_flooded=line_flooded,
        )

    async def _closed(self, depth: int) -> Outcome:
        """A closed load of the mixed requests."""
        settings = self._settings
        draw = random.Random("closed")
        crowd = arrivals(
            draw,
            _MODEL,
            settings.sizes,
            self._mixed,
            [(depth * _LANE_REQUESTS / settings.level_s, settings.level_s)],
        )
        lanes = [crowd[lane::depth] for lane in range(depth)]
        told = await closed_crowd(self._url, lanes, settings.level_s, settings.patience_s)
        return self._outcome(f"closed, {depth} in flight", told, settings.level_s)

    async def _open(
        self,
        name: str,
        callers: Sequence[tuple[Caller, float]],
        parts: Sequence[tuple[float, float]],
        line: Line | None = None,
    ) -> Outcome:
        """Open loads one after the other without a pause; the first one's goodput counts."""
        settings = self._settings
        crowd = arrivals(random.Random(name), _MODEL, settings.sizes, callers, parts)
        url = self._url if line is None else self._patient_url
        told = await open_crowd(url, crowd, settings.patience_s, line)
        return self._outcome(name, told, parts[0][1])

    async def _floor(self, seconds: float) -> list[float]:
        """What the quickest refusal takes at the client, over and over: the machine's noise is in it."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        found = []
        request = Request(0.0, "/v1/chat/completions", b'{"model":"none","messages":[{"role":"user"}]}')
        while loop.time() - started_s < seconds:
            answer = await send(self._light.at(self._url), request, started_s, self._settings.patience_s)
            found.append(answer.ended_s - answer.sent_s)
            await asyncio.sleep(_FLOOR_EVERY_S)
        return found

    def _outcome(self, name: str, told: Sequence[Told], until_s: float) -> Outcome:
        outcome = Outcome(name, told, self._settings.warm_s, until_s, self._settings.ttft_limits_s)
        progress(f"{name}: {outcome.row()}, {outcome.reasons()}")
        return outcome


def figures_of(settings: Settings, measured: Measured) -> list[Figure]:
    """What is to be reached, and the peer's part."""
    capacity, over, normal = measured.capacity.goodput, measured.over, measured.normal
    flooded, line_flooded = (_light_of(load) for load in (measured.flooded, measured.line_flooded))
    alone_s = measured.alone.ttft_s(99)
    line_work = measured.line_over.goodput.work_per_s
    return [
        figure(
            "goodput",
            over.goodput.work_per_s / capacity.work_per_s,
            "work a second answered in time at twice capacity ÷ capacity",
            ">= 0.9",
        ),
        figure(
            "goodput_requests",
            over.goodput.requests_per_s / capacity.requests_per_s,
            "the same in requests a second",
        ),
        figure(
            "ttft_p99",
            over.ttft_s(99) / normal.ttft_s(99),
            "TTFT p99 of what was admitted, at twice capacity ÷ at 0.8 of it",
            "<= 2.0",
        ),
        *(
            figure(
                f"ttft_p99_{priority.name.lower()}",
                over.of_class(priority).ttft_s(99) / normal.of_class(priority).ttft_s(99),
                f"the same of class {priority.name.lower()}",
                "<= 2.0" if priority is Priority.INTERACTIVE else None,
            )
            for priority in CLASSES
        ),
        figure(
            "refusal_p99_ms",
            1000 * over.refusal_s(99),
            "refusals at twice capacity: ms to the client, p99",
            "<= 50",
        ),
        figure("refusals_without_hint", over.num_without_hint, "refusals without Retry-After", "<= 0"),
        figure(
            "broken", len(over.broken), "at twice capacity: neither answered nor told to come again", "<= 0"
        ),
        figure(
            "recovered_s",
            measured.after.recovered_s(settings.over_s),
            "from the drop of the load to the last request that was refused or late, s",
            "<= 10",
        ),
        figure(
            "light_ttft_p99",
            flooded.ttft_s(99) / alone_s,
            "a light tenant's TTFT p99 beside one that sends ten times as much ÷ alone",
            "<= 1.5",
        ),
        figure("light_refused", len(flooded.refused), "its requests that were refused", "<= 0"),
        figure(
            "line_goodput",
            line_work / capacity.work_per_s,
            "the peer, a first-come front: goodput ÷ capacity",
        ),
        figure(
            "line_light_ttft_p99",
            line_flooded.ttft_s(99) / alone_s,
            "the peer: the light tenant's TTFT p99 ÷ alone",
        ),
    ]


def _raw(measured: Measured) -> dict[str, dict[str, Value]]:
    loads = (*measured.levels, measured.normal, measured.over, measured.line_over)
    rows: dict[str, dict[str, Value]] = {}
    for load in (*loads, measured.alone):
        rows |= load.rows()
    rows["at twice capacity: a request that is wrong (404)"] = {
        "refusal p50, ms": rounded(1000 * percentile(measured.floor_s, 50)),
        "refusal p99, ms": rounded(1000 * percentile(measured.floor_s, 99)),
    }
    for load in (measured.flooded, measured.line_flooded):
        rows[load.name] = load.row()
        rows[f"{load.name}: {_LIGHT}"] = _light_of(load).row()
    return rows


def _light_of(load: Outcome) -> Outcome:
    return load.of(lambda one: one.caller.tenant == _LIGHT)


def _shown(value: object) -> Value:
    """A setting; several values as text."""
    return value if isinstance(value, int | float) else str(value)
