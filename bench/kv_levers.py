"""`bench kv-levers`: what each way of making a fetch cheaper brings on this machine.

A prefix of 64 blocks of the built-in model's real size is fetched through the product's own KvCache over
the real RedisStore: the time from `begin` to the delivery of all blocks, proven. Each side differs from
its base in one thing; all are fetched from in turns, forwards and backwards in alternation, and each
ratio is the median over the rounds. Loopback: client and servers share this machine's cores, so what
several sockets, shards or plain TCP bring over a network does not show here.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, field

from antiphon.core.blockhash import Border, extend_chain, root_of
from antiphon.core.clock import WallClock
from antiphon.core.kvblock import KvBlock, Prefix
from antiphon.kv.cache import Delivery, KvCache, KvCacheSettings
from antiphon.kv.codec import OVERHEAD_BYTES, BlockCodec
from antiphon.kv.gate import GateSettings, Rates
from antiphon.kv.heap import keep_freed
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.mackeys import SECRET_BYTES, MacKey, MacKeys
from antiphon.kv.redisstore import open_store
from bench.errors import BenchFault
from bench.lever_servers import cluster, one_server
from bench.load import median
from bench.machine import describe
from bench.pairs import progress
from bench.report import Figure, Run, figure, rounded, today

_SCOPE = b"everybody"
_PATIENCE_S = 20.0
_TTL_MS = 3_600_000
_NUM_MASTERS = 3
_BATCH_BYTES = 10_500_000  # what the gate asks for at once at 1 GB/s: the same for all sides

# Payload of a block of 32 tokens of the built-in model, by KV format (`bench kv-type`).
PAYLOAD_BYTES = {"f16": 737_280, "q8_0": 391_680, "q4_0": 207_360}


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    num_rounds: int = 60
    num_blocks: int = 64
    block_tokens: int = 32

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_rounds=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a side fetches. The defaults are those of `antiphon serve`."""

    way: str = "unix"
    num_sockets: int = 2
    kv_type: str = "f16"
    is_proven: bool = True
    is_near: bool = False  # its host tier holds the prefix


DEFAULT, TCP = "default", "TCP"
SETUPS = {
    DEFAULT: Setup(),
    "1 socket": Setup(num_sockets=1),
    "4 sockets": Setup(num_sockets=4),
    "without MAC": Setup(is_proven=False),
    "q8_0": Setup(kv_type="q8_0"),
    "q4_0": Setup(kv_type="q4_0"),
    "host tier": Setup(is_near=True),
    TCP: Setup(way="TCP"),
    "TCP, 1 socket": Setup(way="TCP", num_sockets=1),
    "TCP, 4 sockets": Setup(way="TCP", num_sockets=4),
    "TLS": Setup(way="TLS"),
    "cluster": Setup(way="cluster"),
}


@dataclass(frozen=True, slots=True)
class Lever:
    """A figure: time of `side` ÷ time of `base`."""

    name: str
    side: str
    base: str
    meaning: str
    goal: str | None = None


LEVERS = (
    Lever("sockets_1", "1 socket", DEFAULT, "unix socket: 1 connection ÷ 2"),
    Lever("sockets_4", "4 sockets", DEFAULT, "unix socket: 4 connections ÷ 2"),
    Lever("tcp_sockets_1", "TCP, 1 socket", TCP, "TCP: 1 connection ÷ 2"),
    Lever("tcp_sockets_4", "TCP, 4 sockets", TCP, "TCP: 4 connections ÷ 2"),
    Lever("unix", DEFAULT, TCP, "unix socket ÷ TCP"),
    Lever("tls", "TLS", TCP, "TLS ÷ TCP"),
    Lever("cluster", "cluster", TCP, "cluster of 3 masters on the same cores ÷ 1 server, TCP"),
    Lever("host_tier", "host tier", DEFAULT, "host tier ÷ Redis", "<= 0.1"),
    Lever("q8_0", "q8_0", DEFAULT, "q8_0 KV ÷ f16 KV, the same tokens", "<= 0.7"),
    Lever("q4_0", "q4_0", DEFAULT, "q4_0 KV ÷ f16 KV, the same tokens", "<= 0.45"),
)


class Unproven(BlockCodec):
    """Believes every value; what it hands out is as long as the payload, not the payload itself."""

    def decode(self, block: KvBlock, value: bytes | memoryview, rank: int = 0) -> memoryview:
        return memoryview(value)[: len(value) - OVERHEAD_BYTES]


@dataclass(slots=True)
class Side:
    """A cache set up in one way, and what its fetches took."""

    cache: KvCache
    blocks: Sequence[KvBlock]
    num_bytes: int  # of payloads
    num_near: int = 0  # blocks that came from the host tier, the last time
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of this process

    def fetch(self) -> None:
        """Once. Raises BenchFault if anything is missing."""
        arrived = threading.Event()
        deliveries: list[tuple[float, Delivery]] = []

        def deliver(delivery: Delivery) -> None:
            deliveries.append((time.perf_counter(), delivery))
            arrived.set()

        prefix = Prefix("fetch", tuple(self.blocks), 0, sum(len(b.token_ids) for b in self.blocks) + 1)
        cpu_s, started_s = time.process_time(), time.perf_counter()
        self.cache.begin(prefix, deliver)
        if not arrived.wait(_PATIENCE_S):
            raise BenchFault("a fetch was not answered")
        self.cpu_s.append(time.process_time() - cpu_s)
        ended_s, delivery = deliveries[0]
        if len(delivery.blocks) != len(self.blocks):
            raise BenchFault(
                f"{len(delivery.blocks)} of {len(self.blocks)} blocks: {delivery.report.decision}"
            )
        self.seconds.append(ended_s - started_s)
        self.num_near = delivery.report.num_host

    def rest(self) -> None:
        """Until what a fetch leaves behind (longer lives for the keys) is written."""
        if not self.cache.drain(_PATIENCE_S):
            raise BenchFault("Redis takes no writes")


class Bench:
    """All sides. Owns their caches until `close`."""

    def __init__(self, settings: Settings, urls: dict[str, str]) -> None:
        self._settings = settings
        self._urls = urls
        self._keys = MacKeys(MacKey.of(secrets.token_bytes(SECRET_BYTES)))
        self._closers = ExitStack()
        self._blocks = {name: chain(settings, _namespace(name)) for name in PAYLOAD_BYTES}
        self.sides: dict[str, Side] = {}

    def fill(self) -> None:
        """Store all prefixes: of every format in the single server, of f16 in the cluster too."""
        for way, kv_types in (("unix", tuple(PAYLOAD_BYTES)), ("cluster", ("f16",))):
            with closing(open_store(self._urls[way])) as store:
                for kv_type in kv_types:
                    codec, payload = self._codec(kv_type), secrets.token_bytes(PAYLOAD_BYTES[kv_type])
                    for block in self._blocks[kv_type]:
                        store.put(codec.key(block), codec.encode(block, payload), _TTL_MS, _PATIENCE_S)

    def measure(self) -> None:
        """All sides in turns; the first round, which connects, does not count."""
        self.sides = {name: self._side(setup) for name, setup in SETUPS.items()}
        for number in range(self._settings.num_rounds + 1):
            progress(f"round {number} of {self._settings.num_rounds}")
            for side in self.sides.values() if number % 2 == 0 else reversed(self.sides.values()):
                side.fetch()
                side.rest()
        for name, side in self.sides.items():
            if side.num_near != (len(side.blocks) if SETUPS[name].is_near else 0):
                raise BenchFault(f"{name}: {side.num_near} blocks came from the host tier")
            del side.seconds[0], side.cpu_s[0]

    def close(self) -> None:
        self._closers.close()

    def _side(self, setup: Setup) -> Side:
        num_bytes = PAYLOAD_BYTES[setup.kv_type]
        blocks = self._blocks[setup.kv_type]
        near_bytes = 2 * num_bytes * len(blocks) if setup.is_near else 0
        cache = KvCache(
            KvCacheSettings(
                block_tokens=self._settings.block_tokens,
                block_bytes=num_bytes,
                host=HostSettings(budget_bytes=near_bytes),
                gate=GateSettings(patience_s=_PATIENCE_S, most_batch_bytes=_BATCH_BYTES),
                rates=Rates(prefill_tokens_per_s=1.0),  # an engine so slow that every fetch pays
            ),
            (open_store(self._urls[setup.way], setup.num_sockets), self._codec(setup.kv_type, setup)),
            WallClock(),
            lambda kind, detail: progress(f"{kind}: {detail}"),
        )
        self._closers.callback(cache.close)
        return Side(cache, blocks, num_bytes * len(blocks))

    def _codec(self, kv_type: str, setup: Setup | None = None) -> BlockCodec:
        kind = BlockCodec if setup is None or setup.is_proven else Unproven
        return kind(_namespace(kv_type), self._keys)


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure all levers. Raises BenchFault."""
    keep_freed()  # as a worker does
    async with _servers() as urls:
        bench = Bench(settings, urls)
        try:
            await asyncio.to_thread(bench.fill)
            await asyncio.to_thread(bench.measure)
        finally:
            await asyncio.to_thread(bench.close)
    return Run(
        bench="kv-levers",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=figures(bench.sides),
        raw={
            name: {
                "MB": rounded(side.num_bytes / 1e6),
                "ms": rounded(1e3 * median(side.seconds)),
                "GB/s": rounded(side.num_bytes / median(side.seconds) / 1e9, 3),
                "client's CPU ms": rounded(1e3 * median(side.cpu_s)),
            }
            for name, side in bench.sides.items()
        },
    )


@asynccontextmanager
async def _servers() -> AsyncIterator[dict[str, str]]:
    """URLs by way."""
    async with one_server() as ways, cluster(_NUM_MASTERS) as masters:
        yield {"unix": ways.unix, "TCP": ways.tcp, "TLS": ways.tls, "cluster": masters}


def figures(sides: dict[str, Side]) -> list[Figure]:
    """Each lever's ratio, and the share of the MAC."""
    found = [
        figure(lever.name, _ratio(sides[lever.side], sides[lever.base]), f"time: {lever.meaning}", lever.goal)
        for lever in LEVERS
    ]
    share = 1 - _ratio(sides["without MAC"], sides[DEFAULT])
    return [*found, figure("mac_share", share, "share of a fetch's time that the MAC takes")]


def chain(settings: Settings, namespace: bytes) -> list[KvBlock]:
    """The blocks of one prompt."""
    size = settings.block_tokens
    ids = [secrets.randbelow(49_152) for _ in range(settings.num_blocks * size)]
    hashes: list[bytes] = []
    extend_chain(hashes, root_of(namespace, _SCOPE, 0, size), ids, size, Border(0, _SCOPE))
    return [
        KvBlock(block_hash, index, tuple(ids[index * size : (index + 1) * size]), _SCOPE)
        for index, block_hash in enumerate(hashes)
    ]


def _namespace(kv_type: str) -> bytes:
    """One a format, as in the product: formats never mix."""
    return f"kv-{kv_type}".ljust(8, "-").encode()


def _ratio(ours: Side, peer: Side) -> float:
    return median([a / b for a, b in zip(ours.seconds, peer.seconds, strict=True)])
