"""`bench kv-wire`: KV values to and from Redis on this machine: bytes a second, and the client's CPU.

First a sweep over all modes of redis-py and redis-benchmark finds each one's fastest, for GET and SET,
each value size, TCP and unix socket, io-threads off and on. Then ours is measured against those two in
turns. CPU is that of the client's process; redis-benchmark's values are never looked at, ours and
redis-py's are held as a fetch holds them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from antiphon.core.kvblock import KvBlock
from antiphon.kv.codec import BlockCodec
from antiphon.kv.heap import keep_freed
from antiphon.kv.mackeys import SECRET_BYTES, MacKey, MacKeys
from antiphon.kv.namespace import NAMESPACE_BYTES
from bench.errors import BenchFault
from bench.load import median
from bench.machine import describe
from bench.pairs import Pairs, progress
from bench.redisserver import binary
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.servers import Command, free_port, running
from bench.wire_sides import (
    MODES,
    Mode,
    Ours,
    Place,
    RedisBenchmark,
    RedisPy,
    RedisPyAsync,
    Sample,
    Side,
    benchmark_key,
    sample,
)

SIZES = {"0.7 MiB": 737_280, "2.8 MiB": 2_949_120, "4 MiB": 2**22}
_CONNECTIONS = (1, 2, 4, 8)
_TASKS = (2, 4)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    num_pairs: int = 9
    num_sweeps: int = 2
    bytes_a_sample: int = 100_000_000
    io_threads: tuple[int, ...] = (1, 2)

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_pairs=3, num_sweeps=1, bytes_a_sample=60_000_000, io_threads=(1,))


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: an operation with values of a size over a transport."""

    transport: str
    io_threads: int
    size: str
    put: bool

    @property
    def operation(self) -> str:
        return "SET" if self.put else "GET"

    @property
    def column(self) -> str:
        return f"{self.operation} {self.size}, {self.transport}"

    @property
    def with_threads(self) -> str:
        """Empty for Redis' default of one."""
        return f", {self.io_threads} io-threads" if self.io_threads > 1 else ""


@dataclass(slots=True)
class Outcome:
    """A case, measured. `swept`: medians of the sweep by mode."""

    swept: dict[str, Sample]
    best_py: str
    best_benchmark: str
    of_py: Pairs[Sample] = field(default_factory=Pairs)
    of_benchmark: Pairs[Sample] = field(default_factory=Pairs)

    def ours(self) -> list[Sample]:
        return self.of_py.ours + self.of_benchmark.ours


@dataclass(frozen=True, slots=True)
class MacCost:
    """CPU seconds a GB of making a value with its MAC, and of proving one."""

    encode_s_gb: float
    decode_s_gb: float


class Meter:
    """Measures one case on one server."""

    def __init__(self, settings: Settings, case: Case, place: Place, client: redis.Redis) -> None:
        self._client = client
        self._case = case
        self._place = place
        self._value = secrets.token_bytes(SIZES[case.size])
        self._num_keys = max(8, settings.bytes_a_sample // len(self._value))
        self._settings = settings

    async def run(self) -> Outcome:
        """Sweep, then pairs."""
        self._client.flushall()
        if not self._case.put:
            for number in range(self._num_keys):
                self._client.set(benchmark_key(number), self._value)
        py: list[Side] = [RedisPy(self._place, mode) for mode in self._modes()]
        py += [RedisPyAsync(self._place, num_tasks) for num_tasks in _TASKS]
        ours: list[Side] = [Ours(self._place, num_threads) for num_threads in (1, 2, 4)]
        benchmarks = [RedisBenchmark(self._place, count) for count in _CONNECTIONS]
        try:
            return await self._measured(ours, py, benchmarks)
        finally:
            for side in (*ours, *py):
                await side.close()

    async def _measured(
        self, ours: Sequence[Side], py: Sequence[Side], benchmarks: Sequence[RedisBenchmark]
    ) -> Outcome:
        everyone: list[Side | RedisBenchmark] = [*ours, *py, *benchmarks]
        swept: dict[str, list[Sample]] = {}
        for number in range(self._settings.num_sweeps + 1):
            for side in everyone:
                measured = await self._sample(side)
                if number:  # the first round opens connections and touches memory
                    swept.setdefault(side.name, []).append(measured)
        middles = {name: _middle(samples) for name, samples in swept.items()}
        best_ours, best_py, best_benchmark = (
            max(sides, key=lambda side: middles[side.name].gb_s) for sides in (ours, py, benchmarks)
        )
        outcome = Outcome(middles, best_py.name, best_benchmark.name)
        for number in range(self._settings.num_pairs):
            for pairs, peer in ((outcome.of_py, best_py), (outcome.of_benchmark, best_benchmark)):
                turns = [(pairs.ours, best_ours), (pairs.peer, peer)]
                for samples, side in turns if number % 2 == 0 else reversed(turns):
                    samples.append(await self._sample(side))
        return outcome

    async def _sample(self, side: Side | RedisBenchmark) -> Sample:
        put, count = self._case.put, self._num_keys
        try:
            if isinstance(side, RedisBenchmark):
                return side.sample(count, len(self._value), put=put, num_requests=count)
            keys = [benchmark_key(number) for number in range(count)]
            return await sample(side, keys, self._value, put=put)
        finally:
            if put:
                self._client.flushall()

    def _modes(self) -> list[Mode]:
        return [mode for mode in MODES if not (self._case.put and mode.is_mget)]


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure all cases. Raises BenchFault."""
    keep_freed()  # as a worker does; redis-py in this process gains by it too
    outcomes: dict[Case, Outcome] = {}
    for io_threads in settings.io_threads:
        async with _server(io_threads) as places:
            for transport, place in places.items():
                with redis.Redis(unix_socket_path=places["unix"].socket) as client:
                    for size in SIZES:
                        for put in (False, True):
                            case = Case(transport, io_threads, size, put)
                            outcomes[case] = await Meter(settings, case, place, client).run()
                            _tell(case, outcomes[case])
    macs = {size: mac_cost(num_bytes) for size, num_bytes in SIZES.items()}
    return report(settings, outcomes, macs, is_quick=is_quick)


def report(
    settings: Settings, outcomes: dict[Case, Outcome], macs: dict[str, MacCost], *, is_quick: bool
) -> Run:
    """What was measured, as figures and rows."""
    return Run(
        bench="kv-wire",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={name: str(value) for name, value in asdict(settings).items()},
        figures=[*_figures(outcomes), *_mac_figures(outcomes, macs)],
        raw=_rows(outcomes, macs),
    )


@asynccontextmanager
async def _server(io_threads: int) -> AsyncIterator[dict[str, Place]]:
    """A server on a port and on a socket."""
    with TemporaryDirectory(prefix="antiphon-bench-") as name:
        places = {"TCP": Place(port=free_port()), "unix": Place(socket=str(Path(name) / "redis.sock"))}

        async def answers() -> bool:
            try:
                with redis.Redis(port=places["TCP"].port) as client:
                    return bool(client.ping())
            except redis.ConnectionError:
                return False

        argv = [binary(), "--bind", "127.0.0.1", "--port", str(places["TCP"].port)]
        argv += ["--unixsocket", places["unix"].socket, "--dir", name, "--save", "", "--appendonly", "no"]
        argv += ["--io-threads", str(io_threads)]
        async with running(Command("redis-server", argv, places["TCP"].url, "", probe=answers)):
            yield places


def _middle(samples: Sequence[Sample]) -> Sample:
    return Sample(median([s.gb_s for s in samples]), median([s.cpu_s_gb for s in samples]))


def _tell(case: Case, outcome: Outcome) -> None:
    progress(case.column + case.with_threads)
    for name, measured in sorted(outcome.swept.items(), key=lambda item: -item[1].gb_s):
        progress(f"    {measured.gb_s:5.2f} GB/s  {measured.cpu_s_gb:.3f} CPU s a GB  {name}")


def _figures(outcomes: dict[Case, Outcome]) -> list[Figure]:
    """The worst of the sizes, by operation and transport, at Redis' default of one io-thread."""
    figures = []
    for put in (False, True):
        for transport in ("TCP", "unix"):
            some = [
                outcome
                for case, outcome in outcomes.items()
                if (case.put, case.transport, case.io_threads) == (put, transport, 1)
            ]
            what = f"{'SET' if put else 'GET'}, {transport}"
            name = f"{'set' if put else 'get'}_{transport.lower()}"
            figures += [
                figure(
                    f"{name}_of_benchmark",
                    min(outcome.of_benchmark.ratio(lambda s: s.gb_s) for outcome in some),
                    f"{what}: bytes a second, ours ÷ redis-benchmark's, worst size",
                    ">= 0.9",
                ),
                figure(
                    f"{name}_of_redis_py",
                    min(outcome.of_py.ratio(lambda s: s.gb_s) for outcome in some),
                    f"{what}: bytes a second, ours ÷ redis-py's fastest mode's, worst size",
                    ">= 1.0",
                ),
                figure(
                    f"{name}_cpu_of_redis_py",
                    max(outcome.of_py.ratio(lambda s: s.cpu_s_gb) for outcome in some),
                    f"{what}: client's CPU seconds a GB, ours ÷ redis-py's fastest mode's, worst size",
                    None if put else "<= 0.667",
                ),
            ]
    return figures


def _rows(outcomes: dict[Case, Outcome], macs: dict[str, MacCost]) -> dict[str, dict[str, Value]]:
    """A column a case; more io-threads have rows of their own."""
    rows: dict[str, dict[str, Value]] = {}

    def put(row: str, case: Case, value: float | str) -> None:
        cell = value if isinstance(value, str) else rounded(value, 3)
        rows.setdefault(row, {})[case.column] = cell

    for case, outcome in outcomes.items():
        threads = case.with_threads
        sides = {
            "ours": _middle(outcome.ours()),
            "redis-py's fastest mode": _middle(outcome.of_py.peer),
            "redis-benchmark": _middle(outcome.of_benchmark.peer),
        }
        for name, measured in sides.items():
            put(f"GB/s: {name}{threads}", case, measured.gb_s)
        for name, measured in sides.items():
            put(f"CPU s a GB: {name}{threads}", case, measured.cpu_s_gb)
        put(f"redis-py's fastest mode{threads}", case, outcome.best_py)
        put(f"redis-benchmark's fastest mode{threads}", case, outcome.best_benchmark)
    for case, outcome in outcomes.items():
        if not case.with_threads:
            cost = macs[case.size]
            put("CPU s a GB: the MAC", case, cost.encode_s_gb if case.put else cost.decode_s_gb)
            for name, measured in outcome.swept.items():
                put(f"sweep, GB/s: {name}", case, measured.gb_s)
    return rows


def mac_cost(value_bytes: int, num_rounds: int = 15) -> MacCost:
    """Of values of this size."""
    codec = BlockCodec(bytes(NAMESPACE_BYTES), MacKeys(MacKey.of(secrets.token_bytes(SECRET_BYTES))))
    block = KvBlock(secrets.token_bytes(32), 0, tuple(range(32)), b"scope")
    payload = secrets.token_bytes(value_bytes)
    encodes, decodes = [], []
    for _ in range(num_rounds):
        started_s = time.process_time()
        value = codec.encode(block, payload)
        encoded_s = time.process_time()
        if len(codec.decode(block, value)) != value_bytes:
            raise BenchFault("the codec lost bytes")
        decodes.append(time.process_time() - encoded_s)
        encodes.append(encoded_s - started_s)
    num_gb = value_bytes / 1e9
    return MacCost(median(encodes) / num_gb, median(decodes) / num_gb)


def _mac_figures(outcomes: dict[Case, Outcome], macs: dict[str, MacCost]) -> list[Figure]:
    shares = [
        macs[case.size].decode_s_gb / _middle(outcome.ours()).cpu_s_gb
        for case, outcome in outcomes.items()
        if not case.put and case.io_threads == 1
    ]
    return [figure("mac_of_get", median(shares), "CPU seconds a GB, proving a value ÷ getting it")]
