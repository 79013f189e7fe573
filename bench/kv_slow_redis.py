"""`bench kv-slow-redis`: what a slow, throttled or dead Redis costs a request, and how soon it is used again.

A scripted engine (a fixed time a token) with the product's KV tiers, behind a proxy that spoils what
Redis answers. Every prompt's blocks lie in Redis. Beyond recompute: the time to a request's first token
less that of an engine without tiers, which computes every prompt; below zero where fetching helped.
Healed: from the end of the fault to the arrival of the first request that got blocks from Redis; one
is sent every tenth of a second.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field

from antiphon.core.clock import WallClock
from antiphon.core.generation import Generation, KvReport, Sampling
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import Chunk
from antiphon.engine.scripted import ScriptedRunner, ScriptedSettings, babble
from antiphon.kv.cache import KvCache, KvCacheSettings
from antiphon.kv.codec import BlockCodec
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.mackeys import MacKey, MacKeys
from antiphon.kv.redisstore import open_store
from antiphon.obs.log import configure_logging
from antiphon.worker.enginethread import EngineThread, StepNews
from bench.errors import BenchFault
from bench.faultproxy import FaultProxy, Faults
from bench.load import median
from bench.machine import describe
from bench.pairs import progress
from bench.redisserver import RedisServer, redis_server
from bench.report import Run, Value, figure, rounded, today

_NAMESPACE = b"slowness"
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    num_prompts: int = 24
    prompt_tokens: int = 648
    token_s: float = 0.0005
    block_kib: int = 256  # of 16 tokens
    num_requests: int = 20  # with each fault
    redis_mib: int = 1024

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_prompts=10, num_requests=8)


@dataclass(frozen=True, slots=True)
class Ailment:
    """A fault of the proxy, or a stopped server."""

    name: str
    faults: Faults = field(default_factory=Faults)
    is_stopped: bool = False


WELL = Ailment("none")
AILMENTS = (
    Ailment("5 ms later", Faults(delay_s=0.005)),
    Ailment("50 ms later", Faults(delay_s=0.05)),
    Ailment("500 ms later", Faults(delay_s=0.5)),
    Ailment("20 MB/s", Faults(bytes_per_s=20e6)),
    Ailment("1 MB/s", Faults(bytes_per_s=1e6)),
    Ailment("silent after 1 MB", Faults(swallow_after=10**6)),
    Ailment("stopped (SIGSTOP)", is_stopped=True),
)


def padded_runner(settings: Settings) -> ScriptedRunner:
    """A scripted runner whose blocks have the size of a real model's."""
    block_tokens = ScriptedSettings().block_tokens
    script = ScriptedSettings(
        context_tokens=1024,
        block_tokens=block_tokens,
        max_sequences=4,
        step_s=lambda chunks: settings.token_s * _num_tokens(chunks),
        kv_token_bytes=settings.block_kib * 1024 // block_tokens,
    )
    return ScriptedRunner(babble, script, time.sleep)


def _num_tokens(chunks: list[Chunk]) -> int:
    return sum(len(chunk.tokens) for chunk in chunks)


@dataclass(frozen=True, slots=True)
class Answered:
    """The first token of a request."""

    ttft_s: float
    kv: KvReport | None


@dataclass(slots=True)
class Worker:
    """An engine thread, asked one request at a time."""

    settings: Settings
    thread: EngineThread
    first: dict[str, asyncio.Future[KvReport | None]] = field(default_factory=dict)
    num_asked: int = 0

    def deliver(self, news: StepNews) -> None:
        for output in news.outputs:
            arrival = self.first.pop(output.generation, None)
            if arrival is not None:
                arrival.set_result(output.kv)

    async def ask(self) -> Answered:
        """The next prompt in turn: by the time it comes again the engine has long forgotten it."""
        settings, number = self.settings, self.num_asked
        self.num_asked += 1
        prompt = (number % settings.num_prompts).to_bytes(2, "big") + bytes(settings.prompt_tokens - 2)
        name = str(number)
        arrival: asyncio.Future[KvReport | None] = asyncio.get_running_loop().create_future()
        self.first[name] = arrival
        started_s = time.perf_counter()
        self.thread.submit(
            Generation(
                id=name,
                model="scripted",
                sampling=Sampling(seed=0, max_tokens=1, temperature=0.0),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
            )
        )
        kv = await asyncio.wait_for(arrival, _PATIENCE_S)
        return Answered(time.perf_counter() - started_s, kv)


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """One fault after the other, each on a worker of its own."""
    async with redis_server(settings.redis_mib) as redis:
        await _fill(settings, redis)
        async with _worker(settings, None) as alone:
            recompute_s = median([(await alone.ask()).ttft_s for _ in range(settings.num_requests)])
        seen = {}
        for ailment in (WELL, *AILMENTS):
            progress(ailment.name)
            seen[ailment.name] = await _suffer(settings, redis, ailment, recompute_s)
    ill = [seen[ailment.name] for ailment in AILMENTS]
    return Run(
        bench="kv-slow-redis",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=[
            figure(
                "beyond_recompute_ms",
                1000 * max(one.most_beyond_s for one in ill),
                "longest time to a first token beyond computing the whole prompt, any fault, ms",
                "<= 50.0",
            ),
            figure(
                "healed_s",
                max(one.healed_s for one in ill),
                "from the end of the fault to the first request served from Redis, longest, s",
                "<= 2.0",
            ),
            figure(
                "well_of_recompute",
                1 + seen[WELL.name].median_beyond_s / recompute_s,
                "time to first token ÷ computing the whole prompt, Redis well",
            ),
        ],
        raw={"recompute": {"TTFT ms": rounded(1000 * recompute_s)}}
        | {name: one.row() for name, one in seen.items()},
    )


@dataclass(frozen=True, slots=True)
class Suffering:
    """What requests saw of one fault."""

    beyond_s: list[float]
    decisions: list[str]
    healed_s: float

    @property
    def most_beyond_s(self) -> float:
        return max(self.beyond_s)

    @property
    def median_beyond_s(self) -> float:
        return median(self.beyond_s)

    def row(self) -> dict[str, Value]:
        counts = {name: self.decisions.count(name) for name in dict.fromkeys(self.decisions)}
        return {
            "beyond recompute, most, ms": rounded(1000 * self.most_beyond_s),
            "median, ms": rounded(1000 * self.median_beyond_s),
            "healed, s": rounded(self.healed_s),
            "decisions": ", ".join(f"{count} {name}" for name, count in counts.items()),
        }


async def _suffer(settings: Settings, redis: RedisServer, ailment: Ailment, recompute_s: float) -> Suffering:
    with FaultProxy(lambda: _connected(redis)) as proxy:
        async with _worker(settings, proxy.url) as worker:
            for _ in range(3):  # while all is well: connections, rates
                await worker.ask()
            with _faulty(proxy, redis, ailment):
                answers = [await worker.ask() for _ in range(settings.num_requests)]
            ended_s = time.perf_counter()
            while True:
                asked_s = time.perf_counter()
                kv = (await worker.ask()).kv
                if kv is not None and kv.num_store:
                    break
                if asked_s - ended_s > _PATIENCE_S:
                    raise BenchFault(f"Redis was not used again after: {ailment.name}")
                await asyncio.sleep(0.1)
    beyond_s = [answer.ttft_s - recompute_s for answer in answers]
    decisions = [answer.kv.decision for answer in answers if answer.kv is not None]
    return Suffering(beyond_s, decisions, asked_s - ended_s)


@contextmanager
def _faulty(proxy: FaultProxy, redis: RedisServer, ailment: Ailment) -> Iterator[None]:
    proxy.faults = ailment.faults
    if ailment.is_stopped:
        os.kill(redis.server.root.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        proxy.faults = Faults()
        if ailment.is_stopped:
            os.kill(redis.server.root.pid, signal.SIGCONT)


async def _fill(settings: Settings, redis: RedisServer) -> None:
    """A worker computes every prompt and writes its blocks."""
    async with _worker(settings, redis.url) as writer:
        for _ in range(settings.num_prompts):
            await writer.ask()


@asynccontextmanager
async def _worker(settings: Settings, url: str | None) -> AsyncIterator[Worker]:
    """A fresh engine that holds two prompts; with tiers where there is a store."""
    clock = WallClock()
    thread = EngineThread(clock, configure_logging(level="error"))
    worker = Worker(settings, thread)
    num_blocks = 2 * (settings.prompt_tokens // 16 + 2)

    def build() -> Engine:
        sizes = EngineSettings(num_blocks=num_blocks, namespace=_NAMESPACE, checkpoint_blocks=8)
        return Engine(padded_runner(settings), sizes, clock)

    await thread.start(build, worker.deliver)
    cache = None if url is None else _cache(settings, url)
    if cache is not None:
        thread.attach(cache)
    try:
        yield worker
    finally:
        await thread.stop()
        if cache is not None:
            await asyncio.to_thread(cache.drain, _PATIENCE_S)
            await asyncio.to_thread(cache.close)


def _cache(settings: Settings, url: str) -> KvCache:
    codec = BlockCodec(_NAMESPACE, MacKeys(MacKey.of(bytes(32))))
    sizes = KvCacheSettings(block_tokens=16, block_bytes=settings.block_kib * 1024, host=HostSettings(0))
    return KvCache(sizes, (open_store(url), codec), WallClock(), lambda kind, detail: None)


def _connected(redis: RedisServer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(redis.socket))
    return connection
