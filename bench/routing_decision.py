"""`bench router`: what one choice of a worker takes in a gateway, and what the directory weighs.

The product's own survey, directory and picker over links that are up because they were told so. Every
replica holds a system prompt and the beginnings of some prompts; each request's prompt of 1,000 blocks is
known in full to somebody, the worst case: the walk goes to its end. Hashing the prompt is timed apart,
and subtracted from the whole, call by call.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil
import structlog

from antiphon.core.clock import WallClock
from antiphon.core.generation import Generation, Load, Sampling, WorkerInfo, WorkerRates
from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks
from antiphon.router.cost import LeastCost
from antiphon.router.link import LinkListener, WorkerLink
from antiphon.router.picker import Picker
from antiphon.router.prompthash import PromptKeys
from antiphon.router.survey import Survey
from bench.load import median, percentile
from bench.machine import describe
from bench.pairs import progress
from bench.report import Run, Value, figure, rounded, today

_NAMESPACE = bytes(32)
_BLOCK_TOKENS = 16
_SYSTEM_BLOCKS = 64
_NUM_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    few_replicas: int = 100
    many_replicas: int = 7500
    prompt_blocks: int = 1000
    most_held_blocks: int = 500  # of one prompt, by one of many replicas
    num_choices: int = 2000
    seed: int = 1

    @classmethod
    def quick(cls) -> Settings:
        return cls(many_replicas=1000, num_choices=300)


class Deaf:
    """Hears nothing: these links never run."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **fields: None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each of many choices, and of the parts."""

    whole_s: list[float]
    hashing_s: list[float]
    deciding_s: list[float]
    updating_s: list[float]

    def row(self) -> dict[str, Value]:
        """Microseconds."""
        return {
            "choice less hashing p50 µs": rounded(1e6 * median(self.deciding_s)),
            "p99 µs": rounded(1e6 * percentile(self.deciding_s, 99)),
            "hashing p50 µs": rounded(1e6 * median(self.hashing_s)),
            "both p50 µs": rounded(1e6 * median(self.whole_s)),
            "a report taken in p50 µs": rounded(1e6 * median(self.updating_s)),
        }


class World:
    """A survey of so many workers, each with something to do and something cached."""

    def __init__(self, settings: Settings, num_replicas: int) -> None:
        self.chance = random.Random(settings.seed)
        self.survey = Survey(WallClock(), self.chance.random)
        self.picker = Picker(self.survey, LeastCost(), self.chance.random)
        system = self._tokens(_SYSTEM_BLOCKS)
        own_blocks = settings.prompt_blocks - _SYSTEM_BLOCKS
        self.prompts = [system + self._tokens(own_blocks) + [1] for _ in range(_NUM_PROMPTS)]
        chains = [self.keys(number) for number in range(_NUM_PROMPTS)]
        self.links = [self._link(number) for number in range(num_replicas)]
        for number, link in enumerate(self.links):
            chain = chains[number % _NUM_PROMPTS]
            is_first = number < _NUM_PROMPTS  # somebody knows every prompt in full
            held = len(chain) if is_first else self.chance.randint(_SYSTEM_BLOCKS, settings.most_held_blocks)
            change = BlockChange(Tier.ENGINE, True, array("Q", chain[:held]).tobytes())
            self.survey.take_blocks(link, Blocks(link.life, 1, [change], part=0, is_last=True))

    def generation(self, number: int) -> Generation:
        """A request with one of the prompts."""
        token_ids = self.prompts[number % _NUM_PROMPTS]
        return Generation(
            id=str(number),
            model="bench",
            sampling=Sampling(seed=number, max_tokens=300),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            scope=b"bench",
        )

    def keys(self, number: int) -> list[int]:
        """Those of a request's prompt, all of them."""
        keys = PromptKeys(self.generation(number), _NAMESPACE, _BLOCK_TOKENS)
        return keys.upto(keys.num_blocks)

    def report(self, link: WorkerLink) -> None:
        """The worker says how busy it is."""
        draw = self.chance.randrange
        rates = WorkerRates(6000.0 + draw(200), 0.02, 0.001, 500.0, 0.0001)
        link.load = Load(1, draw(32), draw(2), draw(8000), draw(1000), 4000, 1000, rates=rates)
        self.survey.load_changed(link)

    def _tokens(self, num_blocks: int) -> list[int]:
        return [self.chance.randrange(50_000) for _ in range(num_blocks * _BLOCK_TOKENS)]

    def _link(self, number: int) -> WorkerLink:
        listener: LinkListener = Deaf()  # type: ignore[assignment] # it has whatever method is asked for
        link = WorkerLink(f"http://w{number}:1", "", listener, structlog.stdlib.get_logger(), number)
        link.life = 1
        link.info = WorkerInfo(
            worker=f"w{number}",
            model="bench",
            revision="",
            namespace=_NAMESPACE.hex(),
            engine="none",
            version="",
            context_tokens=32_768,
            block_tokens=_BLOCK_TOKENS,
            num_blocks=6000,
            max_sequences=64,
        )
        self.survey.link_is_up(link)
        self.report(link)
        return link


def run(settings: Settings, *, is_quick: bool) -> Run:
    """Choices among few and among many replicas, then the directory's weight."""
    timings: dict[int, Timings] = {}
    block_bytes = 0.0
    for number in (settings.few_replicas, settings.many_replicas):
        progress(f"{number} replicas")
        gc.collect()
        before_bytes = psutil.Process().memory_info().rss
        world = World(settings, number)
        gc.collect()
        block_bytes = (psutil.Process().memory_info().rss - before_bytes) / world.survey.directory.num_blocks
        progress(f"{world.survey.directory.num_blocks} blocks")
        timings[number] = time_choices(world, settings.num_choices)
        del world
    few, many = timings[settings.few_replicas], timings[settings.many_replicas]
    return Run(
        bench="router",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings),
        figures=[
            figure(
                "choice_among_few_us",
                1e6 * median(few.deciding_s),
                f"µs for a choice among {settings.few_replicas} replicas, the directory's walk included, p50",
                "<= 200",
            ),
            figure(
                "choice_among_many_us",
                1e6 * median(many.deciding_s),
                f"the same among {settings.many_replicas} replicas",
                "<= 1000",
            ),
            figure(
                "hashing_us",
                1e6 * median(few.hashing_s),
                f"µs for a prompt's {settings.prompt_blocks} keys, blocks of {_BLOCK_TOKENS} tokens, p50",
            ),
            figure(
                "directory_block_bytes",
                block_bytes,
                f"bytes of memory for each block of each of {settings.many_replicas} replicas, all told",
            ),
        ],
        raw={f"{number} replicas": each.row() for number, each in timings.items()},
    )


def time_choices(world: World, number: int) -> Timings:
    """Time choices one by one, with a report taken in between each two."""
    whole_s: list[float] = []
    hashing_s: list[float] = []
    updating_s: list[float] = []
    gc.collect()
    gc.freeze()
    for turn in range(number):
        generation = world.generation(turn)
        started_s = time.perf_counter()
        world.keys(turn)
        hashed_s = time.perf_counter()
        world.picker.pick(generation)
        picked_s = time.perf_counter()
        world.report(world.chance.choice(world.links))
        hashing_s.append(hashed_s - started_s)
        whole_s.append(picked_s - hashed_s)
        updating_s.append(time.perf_counter() - picked_s)
    gc.unfreeze()
    return Timings(whole_s, hashing_s, _less(whole_s, hashing_s), updating_s)


def _less(whole_s: Sequence[float], part_s: Sequence[float]) -> list[float]:
    return [whole - part for whole, part in zip(whole_s, part_s, strict=True)]
