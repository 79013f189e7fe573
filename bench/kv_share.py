"""`bench kv-share`: two workers with one Redis, each turn of a chat at the other one, against one worker.

The two workers have half of the KV memory each and are driven through a gateway each, so that every turn
goes where the chat was not the turn before: what round-robin does to a cache. The one worker has all the
memory and no Redis. Figure: the share of prompt tokens that were not computed, by the workers' own count,
two ÷ one. Chats of a turn run some at a time; the two workers take turns, so that they do not disturb
each other on a small machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

from bench import commands
from bench.client import Target
from bench.commands import Shape, Tiers
from bench.conversations import Chat, Growth, Reply, ask
from bench.load import percentile
from bench.machine import describe
from bench.metrics import linked, num_computed
from bench.pairs import in_pairs, median_of, progress
from bench.redisserver import redis_server
from bench.report import Run, Value, figure, rounded, today
from bench.servers import Server, running
from bench.sides import served_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench. `kv_tokens`: of the engines of one side together, room for all its chats."""

    model: str = "smollm2"
    num_pairs: int = 2
    num_chats: int = 8
    num_turns: int = 5
    first_tokens: int = 500
    num_lanes: int = 4
    context_tokens: int = 2048
    kv_tokens: int = 12288
    redis_mib: int = 2048
    host_mib: int = 256  # of each worker, with Redis or without
    think_s: float = 0.3  # between the workers

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_pairs=1, num_chats=4, num_turns=3)

    def chats(self, seed: int) -> list[Chat]:
        """Chats that have not begun, other ones for every seed."""
        growth = Growth(first=self.first_tokens)
        return [Chat.draw(f"share {seed} {n}", self.num_turns, growth) for n in range(self.num_chats)]


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker and the gateway in front of it."""

    worker: Server
    target: Target


@dataclass(frozen=True, slots=True)
class Measured:
    """What one side did with its chats."""

    num_prompt_tokens: int
    num_computed: int
    ttft_p50_s: float  # of all turns but the first

    @property
    def spared(self) -> float:
        """The share of prompt tokens that were not computed."""
        return 1 - self.num_computed / self.num_prompt_tokens


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure both sides in pairs."""
    async with _seats(settings) as (two, one):
        pairs = await in_pairs(
            settings.num_pairs,
            lambda seed: _converse(settings, two, seed),
            lambda seed: _converse(settings, one, seed),
        )
    raw: dict[str, dict[str, Value]] = {}
    for name, side in (("two workers, Redis", pairs.ours), ("one worker", pairs.peer)):
        raw[name] = {
            "share not computed": rounded(median_of(side, lambda m: m.spared)),
            "prompt tokens": rounded(median_of(side, lambda m: m.num_prompt_tokens), 6),
            "computed": rounded(median_of(side, lambda m: m.num_computed), 6),
            "TTFT p50 of turns 2 on, s": rounded(median_of(side, lambda m: m.ttft_p50_s)),
        }
    spared = pairs.ratio(lambda m: m.spared)
    ttft = pairs.ratio(lambda m: m.ttft_p50_s)
    return Run(
        bench="kv-share",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=[
            figure("not_computed", spared, "share of prompt tokens not computed, two ÷ one", ">= 0.9"),
            figure("ttft_p50", ttft, "TTFT p50 of turns 2 on, two ÷ one"),
        ],
        raw=raw,
    )


@asynccontextmanager
async def _seats(settings: Settings) -> AsyncIterator[tuple[list[Seat], list[Seat]]]:
    """Two workers with Redis and one without, idle but ready."""
    async with AsyncExitStack() as stack:
        fleet = stack.enter_context(commands.fleet(settings.model))
        store = await stack.enter_async_context(redis_server(settings.redis_mib))

        async def seat(share: int, tiers: Tiers) -> Seat:
            shape = Shape(
                num_streams=settings.num_lanes,
                context_tokens=settings.context_tokens,
                threads=None,
                kv_tokens=settings.kv_tokens // share,
            )
            command = fleet.worker(shape, tiers=tiers)
            worker = await stack.enter_async_context(running(command))
            gateway = await stack.enter_async_context(running(fleet.gateway(command)))
            await linked(gateway)
            return Seat(worker, Target(gateway.url))

        shared = Tiers(store.url, settings.host_mib)
        two = [await seat(2, shared) for _ in range(2)]
        yield two, [await seat(1, Tiers("none", settings.host_mib))]


async def _converse(settings: Settings, seats: Sequence[Seat], seed: int) -> Measured:
    """All chats through all turns; a chat's next turn is the next seat's."""
    chats = settings.chats(seed)
    model = await served_model(seats[0].target)
    before = [await num_computed(seat.worker) for seat in seats]
    num_prompt_tokens, ttfts = 0, list[float]()
    for turn in range(settings.num_turns):
        for place, seat in enumerate(seats):
            mine = [chat for n, chat in enumerate(chats) if (n + turn) % len(seats) == place]
            replies = await _lanes(settings.num_lanes, seat.target, model, mine)
            num_prompt_tokens += sum(reply.answer.num_prompt_tokens for reply in replies)
            ttfts += [reply.answer.ttft_s for reply in replies if turn]
            await asyncio.sleep(settings.think_s)
    after = [await num_computed(seat.worker) for seat in seats]
    measured = Measured(num_prompt_tokens, sum(after) - sum(before), percentile(ttfts, 50))
    progress(
        f"{len(seats)} worker(s): {measured.num_computed} of {num_prompt_tokens} prompt tokens computed, "
        f"TTFT p50 {measured.ttft_p50_s:.3f} s"
    )
    return measured


async def _lanes(num_lanes: int, target: Target, model: str, chats: Sequence[Chat]) -> list[Reply]:
    """The next turn of every chat, `num_lanes` at a time; the chats hear their answers."""

    async def lane(mine: Sequence[Chat]) -> list[Reply]:
        replies = []
        for chat in mine:
            replies.append(await ask(target, chat.request(model)))
            chat.answers.append(replies[-1].text)
        return replies

    done = await asyncio.gather(*(lane(chats[n::num_lanes]) for n in range(num_lanes)))
    return [reply for replies in done for reply in replies]
