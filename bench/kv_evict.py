"""`bench kv-evict`: what a full Redis still holds of chains, under our TTLs and under LRU.

Several Redis servers get the same traffic at the same time, through the product's own cache: 20 chains a
second, each either new or an earlier conversation that goes on. A conversation that goes on is fetched;
what is missing counts as computed again and is stored, like the new blocks. Lost is a block that Redis
holds and nobody can use, because one before it in its chain is gone. The hit rate stands beside it:
an order that keeps chains whole by throwing conversations away would be no good.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush

from blake3 import blake3

from antiphon.core.clock import WallClock
from antiphon.core.kvblock import KvBlock, Prefix
from antiphon.kv.cache import Delivery, KvCache, KvCacheSettings
from antiphon.kv.codec import BlockCodec
from antiphon.kv.gate import Rates
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.mackeys import MacKey, MacKeys
from antiphon.kv.redisstore import open_store
from bench.errors import BenchFault
from bench.load import median
from bench.machine import describe
from bench.pairs import progress
from bench.redisserver import Eviction, RedisServer, redis_server
from bench.report import Run, figure, rounded, today

_NAMESPACE = b"kv-evict"
_SCOPE = b"everybody"
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    chains_per_s: float = 20.0
    seconds: float = 90.0
    memory_mib: int = 96
    payload_bytes: int = 4096
    least_blocks: int = 4
    most_blocks: int = 40
    share_going_on: float = 0.7  # of conversations have another turn
    pause_s: float = 15.0  # mean, between turns
    seed: int = 1

    @classmethod
    def quick(cls) -> Settings:
        return cls(seconds=25.0, memory_mib=24)


OURS = "volatile-ttl, TTL by depth, 64 samples"
LRU = "allkeys-lru, 64 samples"
EVICTIONS = {
    OURS: Eviction("volatile-ttl", 64),
    LRU: Eviction("allkeys-lru", 64),
    "volatile-ttl, TTL by depth, 10 samples": Eviction("volatile-ttl", 10),
    "allkeys-lru, 10 samples": Eviction("allkeys-lru", 10),
    "allkeys-lru, 5 samples (Redis' default)": Eviction("allkeys-lru", 5),
}


@dataclass(slots=True)
class Side:
    """One server, the cache in front of it, and what was seen there."""

    server: RedisServer
    cache: KvCache
    codec: BlockCodec
    num_wanted: int = 0
    num_got: int = 0
    lost: list[float] = field(default_factory=list)  # share of the blocks held, by look
    held: list[int] = field(default_factory=list)

    def take(self, blocks: Sequence[KvBlock], num_old: int, payload: bytes) -> None:
        """A turn whose first `num_old` blocks were stored before: fetch what is there, store the rest."""
        num_got = 0
        if num_old:
            arrived = threading.Event()
            deliveries: list[Delivery] = []

            def deliver(delivery: Delivery) -> None:
                deliveries.append(delivery)
                arrived.set()

            self.cache.begin(Prefix("turn", tuple(blocks[:num_old]), 0, 2 * num_old + 1), deliver)
            if not arrived.wait(_PATIENCE_S):
                raise BenchFault("a fetch was not answered")
            num_got = len(deliveries[0].blocks)
        self.num_wanted += num_old
        self.num_got += num_got
        self.cache.keep([(block, payload) for block in blocks[num_got:]])

    def look(self, chains: Sequence[Sequence[KvBlock]]) -> None:
        """Count what is held, and what of it is of no use."""
        held = self.server.keys()
        num_used = 0
        for blocks in chains:
            for block in blocks:
                if self.codec.key(block) not in held:
                    break
                num_used += 1
        self.held.append(len(held))
        self.lost.append(1 - num_used / len(held))


class Traffic:
    """Conversations that begin and go on; the same for every side."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._draw = random.Random(settings.seed)
        self._due: list[tuple[float, int]] = []  # when a conversation goes on
        self.chains: list[list[KvBlock]] = []

    def turn(self, now_s: float) -> tuple[list[KvBlock], int]:
        """The next chain, and how many of its blocks are old."""
        settings, draw = self._settings, self._draw
        if self._due and self._due[0][0] <= now_s:
            _, number = heappop(self._due)
            num_new = draw.randint(2, 8)
        else:
            number = len(self.chains)
            self.chains.append([])
            num_new = draw.randint(settings.least_blocks, settings.most_blocks)
        blocks = self.chains[number]
        num_old = len(blocks)
        for index in range(num_old, num_old + num_new):
            block_hash = blake3(b"%d %d" % (number, index)).digest()
            blocks.append(KvBlock(block_hash, index, (number, index), _SCOPE))
        if draw.random() < settings.share_going_on:
            heappush(self._due, (now_s + draw.expovariate(1 / settings.pause_s), number))
        return blocks, num_old


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """All sides at once."""
    async with AsyncExitStack() as stack:
        sides = {
            name: await stack.enter_async_context(_side(settings, eviction))
            for name, eviction in EVICTIONS.items()
        }
        await asyncio.to_thread(_drive, settings, list(sides.values()))
    ours, lru = sides[OURS], sides[LRU]
    return Run(
        bench="kv-evict",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=[
            figure("lost", median(ours.lost), f"blocks lost behind holes ÷ blocks held, {OURS}", "<= 0.03"),
            figure("lost_of_lru", median(ours.lost) / median(lru.lost), f"lost, ours ÷ {LRU}", "<= 1.0"),
            figure(
                "hits_of_lru",
                ours.num_got * lru.num_wanted / (ours.num_wanted * lru.num_got),
                f"share of a returning conversation's blocks that were of use, ours ÷ {LRU}",
                ">= 0.95",
            ),
        ],
        raw={
            name: {
                "lost": rounded(median(side.lost)),
                "most lost": rounded(max(side.lost)),
                "hit rate": rounded(side.num_got / side.num_wanted),
                "blocks held": rounded(median(side.held)),
            }
            for name, side in sides.items()
        },
    )


@asynccontextmanager
async def _side(settings: Settings, eviction: Eviction) -> AsyncIterator[Side]:
    codec = BlockCodec(_NAMESPACE, MacKeys(MacKey.of(bytes(32))))
    async with redis_server(settings.memory_mib, eviction) as server:
        cache = KvCache(
            KvCacheSettings(
                block_tokens=2,
                block_bytes=settings.payload_bytes,
                host=HostSettings(budget_bytes=0),
                rates=Rates(prefill_tokens_per_s=1.0),  # an engine so slow that every fetch pays
            ),
            (open_store(server.url), codec),
            WallClock(),
            lambda kind, detail: progress(f"{kind}: {detail}"),
        )
        try:
            yield Side(server, cache, codec)
        finally:
            await asyncio.to_thread(cache.close)


def _drive(settings: Settings, sides: Sequence[Side]) -> None:
    """Fill all servers, then send the traffic at its pace; look every few seconds after a while."""
    traffic, payload = Traffic(settings), bytes(settings.payload_bytes)
    full_bytes = 0.95 * settings.memory_mib * 2**20
    progress("filling")
    while min(side.server.used_bytes() for side in sides) < full_bytes:
        for _ in range(20):
            _turn(traffic, 0.0, sides, payload)
        if not all(side.cache.drain(_PATIENCE_S) for side in sides):
            raise BenchFault("Redis takes no writes")
    num_turns = round(settings.seconds * settings.chains_per_s)
    per_look = round(num_turns / 30)
    started_s = time.monotonic()
    for number in range(num_turns):
        due_s = number / settings.chains_per_s
        time.sleep(max(0.0, started_s + due_s - time.monotonic()))
        _turn(traffic, due_s, sides, payload)
        if number >= num_turns / 2 and number % per_look == 0:
            progress(f"{due_s:.0f} of {settings.seconds:.0f} s")
            for side in sides:
                side.look(traffic.chains)
        elif number < num_turns / 2:
            for side in sides:
                side.num_wanted = side.num_got = 0


def _turn(traffic: Traffic, now_s: float, sides: Sequence[Side], payload: bytes) -> None:
    blocks, num_old = traffic.turn(now_s)
    for side in sides:
        side.take(blocks, num_old, payload)
