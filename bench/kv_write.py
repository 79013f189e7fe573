"""`bench kv-write`: what write-behind costs the answers that are being made.

Two workers, idle in turn: one writes every block it fills to its host tier and to Redis, one keeps
nothing beyond its engine. Each load is a batch of distinct prompts, so nothing is read back. Figures:
output tokens a CPU second of the worker's processes (export, MAC and socket writes are in it, also those
after the last token; Redis' own time is listed apart), and tokens a second.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

from bench import commands
from bench.client import Target
from bench.commands import Shape, Tiers
from bench.errors import BenchFault
from bench.load import Summary, completions, insist, open_load, summarise
from bench.machine import describe
from bench.metrics import linked
from bench.pairs import in_pairs, median_of, progress
from bench.redisserver import RedisServer, redis_server
from bench.report import Run, Value, figure, rounded, today
from bench.servers import Server, running
from bench.sides import served_model

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench."""

    model: str = "smollm2"
    num_pairs: int = 10
    threads: int | None = 1  # of the engines; where several wait for each other they spin: CPU time too
    num_streams: int = 8
    prompt_tokens: int = 150
    answer_tokens: int = 64
    context_tokens: int = 512
    block_tokens: int = 32
    redis_mib: int = 2048
    host_mib: int = 256
    after_s: float = 0.5  # from the last token to the reading of the CPU clock, on both sides

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_pairs=3)

    @property
    def num_blocks(self) -> int:
        """Blocks that a load fills: the last token of an answer is never put in."""
        return self.num_streams * ((self.prompt_tokens + self.answer_tokens - 1) // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Side:
    """One worker behind its gateway; `store` where it writes."""

    worker: Server
    target: Target
    store: RedisServer | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One load."""

    summary: Summary
    cpu_s: float
    redis_cpu_s: float
    num_written: int

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.summary.num_tokens / self.cpu_s


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure both workers in pairs. Raises BenchFault where blocks are not written."""
    async with _sides(settings) as (writing, plain):
        model = await served_model(plain.target)
        for side in (writing, plain):
            await _load(settings, side, model, -1)
        pairs = await in_pairs(
            settings.num_pairs,
            lambda seed: _load(settings, writing, model, seed),
            lambda seed: _load(settings, plain, model, seed),
        )
    raw: dict[str, dict[str, Value]] = {}
    for name, measured in (("write-behind", pairs.ours), ("off", pairs.peer)):
        raw[name] = {
            "tokens a CPU second": rounded(median_of(measured, lambda m: m.tokens_per_cpu_s)),
            "tokens/s": rounded(median_of(measured, lambda m: m.summary.tokens_per_s)),
            "TPOT p50 ms": rounded(1e3 * median_of(measured, lambda m: m.summary.tpot_p50_s)),
            "CPU s": rounded(median_of(measured, lambda m: m.cpu_s)),
            "Redis CPU s": rounded(median_of(measured, lambda m: m.redis_cpu_s)),
            "blocks written": rounded(median_of(measured, lambda m: m.num_written)),
        }
    cpu = pairs.ratio(lambda m: m.tokens_per_cpu_s)
    wall = pairs.ratio(lambda m: m.summary.tokens_per_s)
    tpot = pairs.ratio(lambda m: m.summary.tpot_p50_s)
    return Run(
        bench="kv-write",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=[
            figure("tokens_per_cpu", cpu, "output tokens a CPU second, write-behind ÷ off", ">= 0.97"),
            figure("tokens_per_s", wall, "output tokens a second, write-behind ÷ off"),
            figure("tpot_p50", tpot, "TPOT p50, write-behind ÷ off"),
        ],
        raw=raw,
    )


@asynccontextmanager
async def _sides(settings: Settings) -> AsyncIterator[tuple[Side, Side]]:
    """The writing worker and the other one, both ready."""
    shape = Shape(
        num_streams=settings.num_streams, context_tokens=settings.context_tokens, threads=settings.threads
    )
    async with AsyncExitStack() as stack:
        fleet = stack.enter_context(commands.fleet(settings.model))
        store = await stack.enter_async_context(redis_server(settings.redis_mib))

        async def side(tiers: Tiers, written: RedisServer | None) -> Side:
            command = fleet.worker(shape, tiers=tiers)
            worker = await stack.enter_async_context(running(command))
            gateway = await stack.enter_async_context(running(fleet.gateway(command)))
            await linked(gateway)
            return Side(worker, Target(gateway.url), written)

        yield await side(Tiers(store.url, settings.host_mib), store), await side(commands.NO_TIERS, None)


async def _load(settings: Settings, side: Side, model: str, seed: int) -> Measured:
    requests = completions(
        random.Random(f"write {seed}"),
        [0.0] * settings.num_streams,
        model=model,
        prompt_tokens=settings.prompt_tokens,
        answer_tokens=settings.answer_tokens,
    )
    store = side.store
    keys, redis_s = (store.num_keys(), store.server.cpu_s()) if store else (0, 0.0)
    cpu_s = side.worker.cpu_s()
    answers = insist(await open_load(side.target, requests, _LIMIT_S), side.target.url)
    await asyncio.sleep(settings.after_s)
    cpu_s = side.worker.cpu_s() - cpu_s
    num_written, redis_s = (store.num_keys() - keys, store.server.cpu_s() - redis_s) if store else (0, 0.0)
    if store and num_written < settings.num_blocks:
        raise BenchFault(f"{num_written} of {settings.num_blocks} blocks were written: see the worker's log")
    measured = Measured(summarise(answers), cpu_s, redis_s, num_written)
    progress(
        f"{'write-behind' if store else 'off'}: {measured.tokens_per_cpu_s:.1f} tokens a CPU second, "
        f"{measured.summary.tokens_per_s:.1f} tokens/s, {num_written} blocks written"
    )
    return measured
