"""`bench engine`: the embedded engine behind our gateway against llama-server, on text completions.

Variants:
    a     the shipped file for both; ours may tune its weights
    b     the file that ours tuned, for both
    busy  the tuned file for both, beside a process that keeps one core busy; each side chooses its own
          number of threads

bench/sides.py describes the loads. TTFT under `full` is mostly queueing and follows the throughput.
llama-server runs with the KV mode that a short sweep finds faster, and without its prompt cache, which
distinct prompts could only slow down.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench import commands
from bench.client import Target
from bench.commands import KvMode, Shape
from bench.errors import BenchFault
from bench.floors import measure_floors
from bench.load import Summary
from bench.machine import describe
from bench.pairs import Pairs, in_pairs, median_of, progress
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.servers import Server, running
from bench.sides import Side, Sizes, served_model

VARIANTS = ("a", "b", "busy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench; counts are requests of one load."""

    threads: int
    num_pairs: int = 3
    num_turn: int = 4
    num_full: int = 16
    num_open: int = 8
    num_busy: int = 4  # and as many streams: beside a neighbour llama-server's steps can take seconds,
    num_busy_pairs: int = 2  # so there are few of them
    num_busy_tokens: int = 16  # of an answer
    num_streams: int = 16
    context_tokens: int = 512

    @classmethod
    def quick(cls, threads: int) -> Settings:
        return cls(threads=threads, num_pairs=1, num_turn=3, num_full=16, num_open=8, num_busy_pairs=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's part of a pair."""

    turn: Summary
    full: Summary
    open: Summary


@dataclass(frozen=True, slots=True)
class Goals:
    """What a variant has to reach."""

    turn: str
    full: str
    ttft: str | None


@dataclass(slots=True)
class EngineBench:
    """Runs the variants one after the other and gathers their figures."""

    settings: Settings
    binary: Path
    tuned: Path | None  # the file that ours tuned; variant a finds it
    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, dict[str, Value]] = field(default_factory=dict)
    swept: dict[Path, tuple[KvMode, float]] = field(default_factory=dict)

    async def run(self, variants: Iterable[str], *, is_quick: bool) -> AsyncIterator[Run]:
        """Measure these variants, in their order; after each, the run as far as it has come."""
        for variant in variants:
            progress(f"variant {variant}")
            if variant == "a":
                await self._tuned_against_shipped()
            elif variant == "b":
                await self._same_file()
            else:
                await self._beside_a_busy_neighbour()
            yield self._so_far(is_quick=is_quick)

    def _so_far(self, *, is_quick: bool) -> Run:
        settings: dict[str, Value] = {**asdict(self.settings), **asdict(Sizes())}
        settings["tuned file"] = short_name(self.tuned) if self.tuned else None
        return Run(
            bench="engine",
            date=today(),
            quick=is_quick,
            machine=describe(),
            settings=settings,
            figures=self.figures,
            raw=self.raw,
        )

    async def _tuned_against_shipped(self) -> None:
        shipped = commands.shipped_model()
        mode, rate = await self._sweep(shipped)
        async with self._both("smollm2", "auto", shipped, mode, self._shape) as (ours, peer, worker):
            self.tuned = served_file(worker)
            progress(f"ours serves {self.tuned}")
            self._add("a", await self._pairs(ours, peer, rate), Goals("<= 0.8", ">= 1.5", None))
            await self._add_floors(ours)

    async def _same_file(self) -> None:
        tuned = self._tuned_file()
        mode, rate = await self._sweep(tuned)
        async with self._both(str(tuned), "as-is", tuned, mode, self._shape) as (ours, peer, _):
            self._add("b", await self._pairs(ours, peer, rate), Goals("<= 1.03", ">= 1.0", "<= 1.0"))

    async def _beside_a_busy_neighbour(self) -> None:
        tuned, num = self._tuned_file(), self.settings.num_busy
        mode, rate = await self._sweep(tuned)
        shape = replace(self._shape, threads=None, num_streams=num)
        async with self._both(str(tuned), "as-is", tuned, mode, shape) as sides:
            sizes = Sizes(answer_tokens=self.settings.num_busy_tokens)
            ours, peer = (replace(side, sizes=sizes) for side in sides[:2])
            with busy_neighbour():
                pairs = await in_pairs(
                    self.settings.num_busy_pairs,
                    lambda seed: ours.full(seed, num, rate),
                    lambda seed: peer.full(seed, num, rate),
                )
        meaning = f"beside a busy neighbour, {num} streams: output tokens/s, ours ÷ llama-server"
        ratio = pairs.ratio(lambda s: s.tokens_per_s)
        self.figures.append(figure("busy_full_tokens_per_s", ratio, meaning, ">= 2.0"))
        for name, side in (("ours", pairs.ours), ("llama-server", pairs.peer)):
            speed = median_of(side, lambda s: s.tokens_per_s)
            self.raw[f"busy: {name}"] = {"full, tokens/s": rounded(speed)}

    @property
    def _shape(self) -> Shape:
        settings = self.settings
        return Shape(
            num_streams=settings.num_streams,
            context_tokens=settings.context_tokens,
            threads=settings.threads,
        )

    def _tuned_file(self) -> Path:
        if self.tuned is None:
            raise BenchFault("which file did ours tune? Run variant a first, or name it with --tuned PATH")
        return self.tuned

    @asynccontextmanager
    async def _both(
        self, model: str, weights: str, peer_file: Path, mode: KvMode, shape: Shape
    ) -> AsyncIterator[tuple[Side, Side, Server]]:
        """Both sides up and warm; while one is measured the other is idle."""
        command = commands.llama_server(self.binary, peer_file, shape, mode, cache_mib=0)
        async with (
            commands.antiphon(model, shape, weights=weights) as system,
            running(command) as server,
        ):
            ours = Side("ours", await served_model(system.target), system.target, Sizes())
            peer = Side("llama-server", "any", Target(server.url), Sizes())
            for side in (ours, peer):
                await side.turn(-1, 2)
            yield ours, peer, system.worker

    async def _sweep(self, model: Path) -> tuple[KvMode, float]:
        """llama-server's fastest KV mode for this file, and the requests/s it serves then."""
        if model in self.swept:
            return self.swept[model]
        speeds: list[tuple[float, KvMode]] = []
        for mode in commands.MODES:
            command = commands.llama_server(self.binary, model, self._shape, mode, cache_mib=0)
            async with running(command) as server:
                side = Side("llama-server", "any", Target(server.url), Sizes())
                await side.turn(-1, 1)
                measured = await side.full(-2, self.settings.num_streams, 1.0)
            row = f"sweep: llama-server, {short_name(model)}, {mode.name}"
            progress(f"{row}: {measured.tokens_per_s:.1f} tokens/s")
            self.raw[row] = {"full, tokens/s": rounded(measured.tokens_per_s)}
            speeds.append((measured.tokens_per_s, mode))
        speed, mode = max(speeds, key=lambda pair: pair[0])
        self.swept[model] = mode, speed / Sizes().answer_tokens
        return self.swept[model]

    async def _pairs(self, ours: Side, peer: Side, rate: float) -> Pairs[Measured]:
        return await in_pairs(
            self.settings.num_pairs,
            lambda seed: self._measure(ours, seed, rate),
            lambda seed: self._measure(peer, seed, rate),
        )

    async def _measure(self, side: Side, seed: int, rate: float) -> Measured:
        settings = self.settings
        measured = Measured(
            await side.turn(seed, settings.num_turn),
            await side.full(seed, settings.num_full, rate),
            await side.open(seed, settings.num_open, rate),
        )
        progress(
            f"{side.name}: 1 stream {measured.turn.wall_s:.2f} s; full {measured.full.tokens_per_s:.1f} "
            f"tokens/s; open TTFT p50 {measured.open.ttft_p50_s:.3f} s, p99 {measured.open.ttft_p99_s:.3f} s"
        )
        return measured

    def _add(self, variant: str, pairs: Pairs[Measured], goals: Goals) -> None:
        rows = (
            ("turn_time", lambda m: m.turn.wall_s, "1 stream: total time", goals.turn),
            ("full_tokens_per_s", lambda m: m.full.tokens_per_s, "16 streams: output tokens/s", goals.full),
            ("full_ttft_p50", lambda m: m.full.ttft_p50_s, "16 streams, all taken: TTFT p50", goals.ttft),
            ("full_ttft_p99", lambda m: m.full.ttft_p99_s, "16 streams, all taken: TTFT p99", goals.ttft),
            ("open_ttft_p50", lambda m: m.open.ttft_p50_s, "70 % load: TTFT p50", goals.ttft),
            ("open_ttft_p99", lambda m: m.open.ttft_p99_s, "70 % load: TTFT p99", goals.ttft),
            ("open_tpot_p50", lambda m: m.open.tpot_p50_s, "70 % load: TPOT p50", None),
        )
        for name, of, meaning, goal in rows:
            text = f"({variant}) {meaning}, ours ÷ llama-server"
            self.figures.append(figure(f"{variant}_{name}", pairs.ratio(of), text, goal))
        for side_name, side in (("ours", pairs.ours), ("llama-server", pairs.peer)):
            self.raw[f"{variant}: {side_name}"] = {
                "1 stream, s": rounded(median_of(side, lambda m: m.turn.wall_s)),
                "full, tokens/s": rounded(median_of(side, lambda m: m.full.tokens_per_s)),
                "full, TTFT p50 s": rounded(median_of(side, lambda m: m.full.ttft_p50_s)),
                "full, TTFT p99 s": rounded(median_of(side, lambda m: m.full.ttft_p99_s)),
                "70 %, TTFT p50 s": rounded(median_of(side, lambda m: m.open.ttft_p50_s)),
                "70 %, TTFT p99 s": rounded(median_of(side, lambda m: m.open.ttft_p99_s)),
                "70 %, TPOT p50 ms": rounded(1e3 * median_of(side, lambda m: m.open.tpot_p50_s)),
            }

    async def _add_floors(self, ours: Side) -> None:
        floors = await measure_floors(ours.target, ours.model, self.settings.num_streams)
        prefill = "ours, prefill: arithmetic a second ÷ numpy's float32 product of 512 rows"
        decode = "ours, decode of 16: arithmetic a second ÷ numpy's float32 product of 16 rows"
        self.figures.append(figure("prefill_of_f32_product", floors.prefill_share, prefill))
        self.figures.append(figure("decode_of_f32_product", floors.decode_share, decode))
        self.raw["ours, alone"] = {
            "prefill, tokens/s": rounded(floors.prefill_tokens_per_s),
            "decode step of 16, ms": rounded(1e3 * floors.decode_step_s),
        }


def served_file(worker: Server) -> Path:
    """The weights that a worker has really mapped, other than the shipped ones if it can be."""
    files = worker.mapped_files(".gguf")
    if not files:
        raise BenchFault("the worker maps no .gguf file: name the tuned one with --tuned PATH")
    shipped = commands.shipped_model().resolve()
    return next((file for file in files if file.resolve() != shipped), files[0])


def short_name(path: Path, most: int = 36) -> str:
    """The file's name, or the end of it: tuned files begin with a digest."""
    return path.name if len(path.name) <= most else "…" + path.name[-24:]


@contextmanager
def busy_neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
