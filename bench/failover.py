"""`bench failover`: workers killed or stopped at random under streams that must not notice.

Workers run the scripted model whose every token depends on the KV before it; one gateway, one Redis for
their KV. Streams differ in kind (temperature 1 with penalties, log probabilities, two choices, held stop
text), and each is compared with itself when nothing happened: text, log probabilities, finish reason and
usage, to the byte. Then the shipped model, greedy: where the text after a move differs, the two best
tokens at that place must have been a near-tie, for KV computed in another batch is rounded otherwise.

Gap: from the fault to the first token after it, of the choices that moved: as many as the gateway counted,
those with the longest pauses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

from bench import commands
from bench.client import Answer, Target, send
from bench.commands import Shape, Tiers
from bench.errors import BenchFault
from bench.failover_streams import Said, Spec, margin_at, pauses, read
from bench.load import percentile
from bench.machine import describe
from bench.metrics import linked, metric
from bench.mortal import Mortal
from bench.pairs import progress
from bench.redisserver import redis_server
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.servers import Server, running

_CATALOGUE = """[[model]]
name = "noise"
engine = "scripted"
script = "noise"
context = 2048
step_s = {step_s}
"""
_LIMIT_S = 120.0
_NEAR_TIE = 0.22  # nats between the two best: their probabilities differ by less than a quarter


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench."""

    num_workers: int = 4
    num_streams: int = 32
    num_faults: int = 16
    num_rounds: int = 2  # other requests, then the first ones again
    num_tokens: int = 200
    step_s: float = 0.02
    calm_s: tuple[float, float] = (0.3, 1.0)  # before each fault, all workers being up
    stopped_s: tuple[float, float] = (1.0, 4.0)
    redis_mib: int = 256
    num_real_streams: int = 6
    num_real_faults: int = 4
    num_real_tokens: int = 96

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_faults=4, num_real_faults=1)


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to a worker, and how many choices the gateway moved because of it."""

    is_kill: bool
    at_s: float
    num_moved: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Streams of a run under faults, each beside what it says undisturbed."""

    faults: Sequence[Fault]
    streams: Sequence[tuple[Answer, Said, Said]]

    @property
    def num_lost(self) -> int:
        return sum(answer.fault is not None for answer, _, _ in self.streams)

    @property
    def num_changed(self) -> int:
        return sum(answer.fault is None and said != calm for answer, said, calm in self.streams)

    def gaps(self, *, is_kill: bool) -> list[float]:
        """Seconds from the faults of a kind to the next token of each choice that moved."""
        found = []
        for fault in self.faults:
            if fault.is_kill == is_kill:
                longest = pauses([said for _, said, _ in self.streams], fault.at_s)
                found += longest[: fault.num_moved]
        return found


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers that may die, and the gateway in front of them."""

    workers: Sequence[Mortal]
    gateway: Server
    model: str


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Both models, one after the other."""
    chance = random.Random(4)
    shape = Shape(num_streams=2 * settings.num_streams, context_tokens=2048, threads=None, kv_tokens=65536)
    catalogue = _CATALOGUE.format(step_s=settings.step_s)
    async with _fleet("noise", shape, settings.num_workers, settings.redis_mib, catalogue) as fleet:
        specs = [
            [Spec.of(stream, number, settings.num_tokens) for number in range(settings.num_rounds)]
            for stream in range(settings.num_streams)
        ]
        scripted = await _disturb(fleet, specs, settings, settings.num_faults, chance)
    shape = Shape(num_streams=settings.num_real_streams, context_tokens=1024, threads=1)
    async with _fleet("smollm2", shape, 2, settings.redis_mib) as fleet:
        specs = [[Spec.greedy(n, settings.num_real_tokens)] for n in range(settings.num_real_streams)]
        real = await _disturb(fleet, specs, settings, settings.num_real_faults, chance)
        control = await _one_by_one(fleet, [spec for lane in specs for spec in lane])
    apart = [margin_at(said, calm) for answer, said, calm in real.streams if answer.fault is None]
    return Run(
        bench="failover",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={
            name: value if isinstance(value, int | float) else str(value)
            for name, value in asdict(settings).items()
        },
        figures=[*_figures(scripted), *_real_figures(real, apart)],
        raw={
            "killed": _row(scripted, is_kill=True),
            "stopped": _row(scripted, is_kill=False),
            "shipped model, killed and stopped": _ties(real.faults, apart),
            "shipped model, alone instead of batched": _ties((), control),
        },
    )


def _figures(outcome: Outcome) -> list[Figure]:
    gaps = outcome.gaps(is_kill=True) + outcome.gaps(is_kill=False)
    return [
        figure("lost", outcome.num_lost, "streams that did not end well", "<= 0"),
        figure("changed", outcome.num_changed, "streams with lost, doubled or other tokens", "<= 0"),
        figure("gap_p50", _percentile(gaps, 50), "fault to next token, s, of choices that moved", "<= 0.5"),
        figure("gap_p99", _percentile(gaps, 99), "the same, 99th percentile", "<= 2.0"),
    ]


def _ties(faults: Sequence[Fault], margins: Sequence[float | None]) -> dict[str, Value]:
    apart = [margin for margin in margins if margin is not None]
    return {
        "streams": len(margins),
        "faults": len(faults),
        "choices moved": sum(fault.num_moved for fault in faults),
        "same text": len(margins) - len(apart),
        "widest tie where it differs, nats": rounded(max(apart)) if apart else None,
    }


def _real_figures(outcome: Outcome, margins: Sequence[float | None]) -> list[Figure]:
    far = sum(margin is not None and margin > _NEAR_TIE for margin in margins)
    return [
        figure("real_lost", outcome.num_lost, "shipped model: streams that did not end well", "<= 0"),
        figure(
            "real_apart", far, f"shipped model: texts that part where no tie (< {_NEAR_TIE} nats) was", "<= 0"
        ),
    ]


def _row(outcome: Outcome, *, is_kill: bool) -> dict[str, Value]:
    gaps = outcome.gaps(is_kill=is_kill)
    return {
        "faults": sum(fault.is_kill == is_kill for fault in outcome.faults),
        "choices moved": len(gaps),
        "gap p50, s": rounded(_percentile(gaps, 50)),
        "gap p99, s": rounded(_percentile(gaps, 99)),
        "longest, s": rounded(max(gaps, default=float("nan"))),
        "streams": len(outcome.streams),
    }


def _shown(value: object) -> Value:
    return value if isinstance(value, int | float) else str(value)


def _percentile(values: Sequence[float], percent: float) -> float:
    return percentile(values, percent) if values else float("nan")


@asynccontextmanager
async def _fleet(
    model: str, shape: Shape, num_workers: int, redis_mib: int, catalogue: str | None = None
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        ours = stack.enter_context(commands.fleet(model, catalogue=catalogue))
        store = await stack.enter_async_context(redis_server(redis_mib))
        made = [ours.worker(shape, tiers=Tiers(store.url, 16)) for _ in range(num_workers)]
        workers = [await stack.enter_async_context(Mortal.living(command)) for command in made]
        gateway = await stack.enter_async_context(running(ours.gateway(*made)))
        await linked(gateway, num_workers)
        yield Fleet(workers, gateway, model)


async def _disturb(
    fleet: Fleet, specs: Sequence[Sequence[Spec]], settings: Settings, num_faults: int, chance: random.Random
) -> Outcome:
    """All requests once undisturbed, then again and again until all faults have been."""
    calm = await _undisturbed(fleet, [spec for lane in specs for spec in lane])
    done = asyncio.Event()
    started_s = asyncio.get_running_loop().time()
    expected = iter(calm)
    lanes = [[(spec, next(expected)) for spec in lane] for lane in specs]
    streaming = [asyncio.create_task(_lane(fleet, lane, started_s, done)) for lane in lanes]
    faults = []
    for number in range(num_faults):
        await asyncio.sleep(chance.uniform(*settings.calm_s))
        faults.append(await _harm(fleet, settings, started_s, chance))
        progress(f"fault {number + 1} of {num_faults}: {faults[-1]}")
    done.set()
    return Outcome(faults, [stream for lane in await asyncio.gather(*streaming) for stream in lane])


async def _harm(fleet: Fleet, settings: Settings, started_s: float, chance: random.Random) -> Fault:
    """Kill or stop one worker and wait until it is back."""
    clock = asyncio.get_running_loop().time
    victim, is_kill = chance.choice(fleet.workers), chance.random() < 0.5
    before = await _num_moved(fleet)
    at_s = clock() - started_s
    if is_kill:
        await victim.kill()
    else:
        await victim.pause(chance.uniform(*settings.stopped_s))
    await linked(fleet.gateway, len(fleet.workers))
    return Fault(is_kill, at_s, int(await _num_moved(fleet) - before))


async def _num_moved(fleet: Fleet) -> float:
    return await metric(fleet.gateway, "antiphon_answer_moves_total", 0.0)


async def _undisturbed(fleet: Fleet, specs: Sequence[Spec], label: str = "calm") -> list[Said]:
    """What all these say when nothing happens. Raises BenchFault where something does."""
    started_s = asyncio.get_running_loop().time()
    target = Target(fleet.gateway.url)
    asked = (send(target, spec.request(fleet.model, label), started_s, _LIMIT_S) for spec in specs)
    answers = await asyncio.gather(*asked)
    fault = next((answer.fault for answer in answers if answer.fault is not None), None)
    if fault is not None:
        raise BenchFault(f"a stream failed before any fault: {fault}")
    return [read(answer) for answer in answers]


async def _one_by_one(fleet: Fleet, specs: Sequence[Spec]) -> list[float | None]:
    """What another batch alone does to the texts: margins where they part from those of a crowd."""
    calm = await _undisturbed(fleet, specs)
    alone = [(await _undisturbed(fleet, [spec], "alone"))[0] for spec in specs]
    return [margin_at(said, other) for said, other in zip(alone, calm, strict=True)]


async def _lane(
    fleet: Fleet, lane: Sequence[tuple[Spec, Said]], started_s: float, done: asyncio.Event
) -> list[tuple[Answer, Said, Said]]:
    """One stream after the other, until the faults are over."""
    found: list[tuple[Answer, Said, Said]] = []
    while not done.is_set():
        spec, calm = lane[len(found) % len(lane)]
        request = spec.request(fleet.model, f"pass {len(found)}")
        answer = await send(Target(fleet.gateway.url), request, started_s, _LIMIT_S)
        if answer.fault is not None:
            progress(f"a stream failed: {answer.fault}")
        found.append((answer, read(answer), calm))
    return found
