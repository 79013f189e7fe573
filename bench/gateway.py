"""`bench gateway`: what a gateway costs a token and a request, ours against LiteLLM's proxy.

Behind both stands one scripted worker without step time, which says back what it was asked (one byte,
one token): ours is the gateway in front of it, LiteLLM a second hop in front of ours. What counts is the
CPU time of the gateway process alone, so neither worker, client nor the other gateway disturbs the
figure. LiteLLM may fail answers; they are counted, their tokens are not. A gateway may put tokens that
are there already into one stream event, which is cheaper: events are counted beside tokens.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from bench import commands
from bench.client import Answer, Request, Target
from bench.commands import Shape
from bench.load import Summary, Vocabulary, in_turn, insist, median, open_load, poisson, summarise
from bench.machine import describe
from bench.pairs import Pairs, in_pairs, median_of, progress
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.servers import Server

_MODEL = "scripted"
_SAMPLE_S = 0.1
_PACED_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench. `lanes`: streams at once, and answers one after the other in each."""

    num_pairs: int = 2
    lanes: tuple[tuple[int, int], ...] = ((1, 100), (16, 10), (256, 1), (1000, 1))
    answer_tokens: int = 128
    num_paced: int = 300
    paced_per_s: float = 20.0
    limit_s: float = 240.0  # of one answer

    @classmethod
    def quick(cls) -> Settings:
        return cls(
            num_pairs=1,
            lanes=((1, 40), (16, 6), (256, 1), (1000, 1)),
            answer_tokens=64,
            num_paced=100,
            limit_s=120.0,
        )


@dataclass(frozen=True, slots=True)
class Level:
    """One side at one number of streams."""

    tokens_per_cpu_s: float  # tokens relayed in one CPU second of the gateway
    events_per_cpu_s: float
    tokens_per_s: float
    peak_rss_bytes: int
    num_faults: int


@dataclass(frozen=True, slots=True)
class Side:
    """One gateway: whose CPU counts, where to send, and whether a wrong answer ends the bench."""

    name: str
    server: Server
    target: Target
    must_be_right: bool


@dataclass(slots=True)
class GatewayBench:
    """Measures both gateways at every level and gathers the figures."""

    settings: Settings
    litellm: Path
    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, dict[str, Value]] = field(default_factory=dict)

    async def run(self, *, is_quick: bool) -> Run:
        """All levels, then paced arrivals."""
        async with self._both() as (ours, peer):
            idle = {side.name: side.server.rss_bytes() for side in (ours, peer)}
            for num_streams, num_each in self.settings.lanes:
                progress(f"{num_streams} streams")
                levels = await self._levels(ours, peer, num_streams, num_each)
                self._add_level(num_streams, levels)
            self._add_memory(num_streams, levels, idle)
            await self._add_paced(ours, peer)
        return Run(
            bench="gateway",
            date=today(),
            quick=is_quick,
            machine=describe(),
            settings={**asdict(self.settings), "lanes": str(self.settings.lanes)},
            figures=self.figures,
            raw=self.raw,
        )

    @asynccontextmanager
    async def _both(self) -> AsyncIterator[tuple[Side, Side]]:
        num_streams = max(num for num, _ in self.settings.lanes)
        shape = Shape(num_streams=num_streams, context_tokens=1024, threads=None)
        async with (
            commands.antiphon(_MODEL, shape) as system,
            commands.litellm(self.litellm, system.target, _MODEL) as (server, target),
        ):
            ours = Side("ours", system.gateway, system.target, must_be_right=True)
            peer = Side("LiteLLM", server, target, must_be_right=False)
            for side in (ours, peer):
                warm = self._requests("warm", [0.0] * 10, self.settings.answer_tokens)
                insist(await in_turn(side.target, warm, self.settings.limit_s), side.name)
            yield ours, peer

    async def _levels(self, ours: Side, peer: Side, num_streams: int, num_each: int) -> Pairs[Level]:
        return await in_pairs(
            self.settings.num_pairs,
            lambda seed: self._level(ours, seed, num_streams, num_each),
            lambda seed: self._level(peer, seed, num_streams, num_each),
        )

    async def _level(self, side: Side, seed: int, num_streams: int, num_each: int) -> Level:
        settings = self.settings
        requests = self._requests(f"level {seed}", [0.0] * num_streams * num_each, settings.answer_tokens)
        lanes = [requests[lane::num_streams] for lane in range(num_streams)]
        before_s = side.server.cpu_s()
        memory = asyncio.create_task(_peak_rss(side.server, ended := asyncio.Event()))
        done = await asyncio.gather(*(in_turn(side.target, lane, settings.limit_s) for lane in lanes))
        cpu_s = side.server.cpu_s() - before_s
        ended.set()
        answers = [answer for lane in done for answer in lane]
        summary = _judged(side, answers)
        level = Level(
            summary.num_tokens / cpu_s if cpu_s else math.nan,
            sum(a.num_events for a in answers if a.fault is None) / cpu_s if cpu_s else math.nan,
            summary.tokens_per_s,
            await memory,
            summary.num_faults,
        )
        progress(
            f"{side.name}: {level.tokens_per_cpu_s:.0f} tokens a CPU second, "
            f"{level.tokens_per_s:.0f} tokens/s, {level.num_faults} wrong answers"
        )
        return level

    def _add_level(self, num_streams: int, levels: Pairs[Level]) -> None:
        meaning = f"{num_streams} streams: tokens relayed a CPU second of the gateway, ours ÷ LiteLLM"
        ratio = levels.ratio(lambda level: level.tokens_per_cpu_s)
        self.figures.append(figure(f"tokens_per_cpu_{num_streams}", ratio, meaning, ">= 5.0"))
        meaning = f"{num_streams} streams: stream events a CPU second of the gateway, ours ÷ LiteLLM"
        ratio = levels.ratio(lambda level: level.events_per_cpu_s)
        self.figures.append(figure(f"events_per_cpu_{num_streams}", ratio, meaning))
        for name, side in (("ours", levels.ours), ("LiteLLM", levels.peer)):
            self.raw[f"{num_streams} streams: {name}"] = {
                "tokens a CPU second": rounded(median_of(side, lambda level: level.tokens_per_cpu_s)),
                "events a CPU second": rounded(median_of(side, lambda level: level.events_per_cpu_s)),
                "tokens/s": rounded(median_of(side, lambda level: level.tokens_per_s)),
                "wrong answers": sum(level.num_faults for level in side),
            }

    def _add_memory(self, num_streams: int, levels: Pairs[Level], idle: dict[str, int]) -> None:
        """What the process grew from idle to its peak at the most streams, by stream."""
        grown = {
            name: max(level.peak_rss_bytes for level in side) - idle[name]
            for name, side in (("ours", levels.ours), ("LiteLLM", levels.peer))
        }
        ratio = grown["ours"] / grown["LiteLLM"] if grown["LiteLLM"] > 0 else math.nan
        meaning = f"memory a stream at {num_streams} streams, above idle, ours ÷ LiteLLM"
        self.figures.append(figure("memory_per_stream", ratio, meaning))
        for name, num_bytes in grown.items():
            self.raw[f"memory: {name}"] = {
                "idle MiB": rounded(idle[name] / 2**20),
                "KiB a stream": rounded(num_bytes / num_streams / 1024),
            }

    async def _add_paced(self, ours: Side, peer: Side) -> None:
        """TTFT when nothing queues. LiteLLM's part is what it adds to ours; ours is taken whole, worker
        and connect included, which is more than gateway and wire add."""
        progress("paced arrivals")
        pairs = await in_pairs(
            self.settings.num_pairs,
            lambda seed: self._paced(ours, seed),
            lambda seed: self._paced(peer, seed),
        )
        p50 = [(a.ttft_p50_s, b.ttft_p50_s) for a, b in zip(pairs.ours, pairs.peer, strict=True)]
        p99 = [(a.ttft_p99_s, b.ttft_p99_s) for a, b in zip(pairs.ours, pairs.peer, strict=True)]
        for name, measured in (("p50", p50), ("p99", p99)):
            ratio = median([mine / (theirs - mine) for mine, theirs in measured if theirs > mine])
            meaning = f"TTFT added, {name}, ours with its worker ÷ LiteLLM"
            self.figures.append(figure(f"ttft_added_{name}", ratio, meaning))
            self.raw[f"TTFT added, {name}"] = {
                "ours ms": rounded(1e3 * median([mine for mine, _ in measured])),
                "LiteLLM ms": rounded(1e3 * median([theirs - mine for mine, theirs in measured])),
            }

    async def _paced(self, side: Side, seed: int) -> Summary:
        settings = self.settings
        due_s = poisson(random.Random(f"paced {seed}"), settings.num_paced, settings.paced_per_s)
        requests = self._requests(f"paced {seed}", due_s, _PACED_TOKENS)
        return _judged(side, await open_load(side.target, requests, settings.limit_s))

    def _requests(self, seed: str, due_s: Sequence[float], num_tokens: int) -> list[Request]:
        """Streamed chats whose user turn is as long as the answer: the script says it back."""
        draw, vocabulary = random.Random(seed), Vocabulary()
        return [
            Request(
                at_s,
                "/v1/chat/completions",
                _chat(vocabulary.text(draw, num_tokens)[:num_tokens]),
                num_tokens,
            )
            for at_s in due_s
        ]


def _chat(text: str) -> bytes:
    return msgspec.json.encode(
        {
            "model": _MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": len(text),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _judged(side: Side, answers: Sequence[Answer]) -> Summary:
    """What the answers amount to; wrong ones are reported, and fatal where they must be right."""
    if side.must_be_right:
        insist(answers, side.name)
    summary = summarise(answers)
    if summary.num_faults:
        first = next(a.fault for a in answers if a.fault is not None)
        progress(f"{side.name}: {summary.num_faults} of {len(answers)} answers are wrong, first: {first}")
    return summary


async def _peak_rss(server: Server, ended: asyncio.Event) -> int:
    """The most memory that the server held until `ended`."""
    peak = server.rss_bytes()
    while not ended.is_set():
        peak = max(peak, server.rss_bytes())
        try:
            await asyncio.wait_for(ended.wait(), _SAMPLE_S)
        except TimeoutError:
            continue
    return peak
