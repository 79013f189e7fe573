"""`bench split`: prefill and decode workers of their own against as many workers that do both.

Workers run the scripted model: a step takes a part of its own, one for each prompt token and one for each
answer in it, and a token has as much KV as the settings say, so that what goes by way of Redis costs what it
would; everything else is the product. Chats with short prompts arrive at random, and among them long cold
prompts, whose chunks make the answers on the same worker wait. Both sides get the same requests and share
one Redis; ours decides for each prompt, by cost, whether it is worth splitting.

Three more loads show where it does not pay: short prompts alone, long prompts that are warm, and no Redis.
Goodput: requests a second whose first token came within the limit of their kind and whose tokens then came
fast enough. Requests are counted from the moment they were due.
"""

from __future__ import annotations

import operator
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

import msgspec

from bench import commands
from bench.client import Answer, Request, Target
from bench.commands import NO_TIERS, Shape, Tiers
from bench.load import insist, open_load, percentile, poisson
from bench.machine import describe
from bench.metrics import linked, metric
from bench.pairs import Pairs, in_pairs, median_of, progress
from bench.redisserver import redis_server
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.servers import Server, running

_LETTERS = "etaoin shrdlu"
_MODEL = "staged"
_LIMIT_S = 120.0  # of one answer

_CATALOGUE = """[[model]]
name = "staged"
engine = "scripted"
script = "babble"
context = 8192
step_s = {step_s}
prefill_token_s = {prefill_token_s}
decode_row_s = {decode_row_s}
kv_token_bytes = {kv_token_bytes}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench. Tokens of this model are bytes. Prompt lengths are drawn evenly."""

    num_pairs: int = 2
    load_s: float = 12.0
    step_s: float = 0.008
    prefill_token_s: float = 0.0004  # 2,500 prompt tokens a second
    decode_row_s: float = 0.0005
    kv_token_bytes: int = 8192
    redis_mib: int = 2048
    max_sequences: int = 16
    chat_tokens: tuple[int, int] = (40, 120)
    chat_answer: int = 64
    chats_per_s: float = 3.0  # for each pair of workers
    long_tokens: tuple[int, int] = (3000, 5000)
    long_answer: int = 32
    longs_per_s: float = 0.35  # for each pair of workers
    chat_ttft_s: float = 0.5
    long_ttft_s: float = 5.0
    tpot_s: float = 0.03

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_pairs=1, load_s=8.0)

    @property
    def shape(self) -> Shape:
        return Shape(num_streams=self.max_sequences, context_tokens=8192, threads=None, kv_tokens=65_536)

    @property
    def catalogue(self) -> str:
        return _CATALOGUE.format(
            step_s=self.step_s,
            prefill_token_s=self.prefill_token_s,
            decode_row_s=self.decode_row_s,
            kv_token_bytes=self.kv_token_bytes,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load and the fleet it meets. `is_warm`: long prompts were answered once before."""

    name: str
    title: str
    num_workers: int = 2
    has_longs: bool = True
    is_warm: bool = False
    has_redis: bool = True


SCENARIOS = (
    Scenario("mixed", "long cold prompts among chats, 2 workers"),
    Scenario("mixed_4", "the same, 4 workers", num_workers=4),
    Scenario("short", "chats alone", has_longs=False),
    Scenario("warm", "long prompts that are warm", is_warm=True),
    Scenario("no_redis", "long cold prompts, no Redis", has_redis=False),
)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one measurement; both kinds are sent together, those to warm up before."""

    warming: list[Request]
    chats: list[Request]
    longs: list[Request]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a fleet made of a load. Of long prompts NaN where there were none."""

    chat_ttft_s: float  # p90
    long_ttft_s: float  # p50
    gap_s: float  # between two tokens of a chat, p99
    goodput_per_s: float
    num_split: float


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure every scenario in pairs: roles of their own, workers for both."""
    figures: list[Figure] = []
    raw: dict[str, dict[str, Value]] = {}
    for scenario in SCENARIOS:
        pairs = await _pairs(settings, scenario)
        figures += _figures(scenario, pairs)
        half = scenario.num_workers // 2
        raw[f"{scenario.name}: {half} prefill, {half} decode"] = _row(pairs.ours)
        raw[f"{scenario.name}: {scenario.num_workers} both"] = _row(pairs.peer)
    return Run(
        bench="split",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={name: _shown(value) for name, value in asdict(settings).items()},
        figures=figures,
        raw=raw,
    )


async def _pairs(settings: Settings, scenario: Scenario) -> Pairs[Measured]:
    half = scenario.num_workers // 2
    progress(scenario.title)
    return await in_pairs(
        settings.num_pairs,
        lambda seed: _measure(settings, scenario, ["prefill"] * half + ["decode"] * half, seed),
        lambda seed: _measure(settings, scenario, ["both"] * scenario.num_workers, seed),
    )


def make_load(settings: Settings, scenario: Scenario, seed: int) -> Load:
    """Chats and long prompts at random times, as many for each pair of workers."""
    draw = random.Random(f"split {scenario.name} {seed}")
    pairs = scenario.num_workers / 2

    def requests(lengths: tuple[int, int], num_answer: int, per_s: float) -> list[Request]:
        due_s = poisson(draw, max(1, round(settings.load_s * per_s * pairs)), per_s * pairs)
        return [_request(draw, at_s, draw.randint(*lengths), num_answer) for at_s in due_s]

    chats = requests(settings.chat_tokens, settings.chat_answer, settings.chats_per_s)
    longs: list[Request] = []
    if scenario.has_longs:
        longs = requests(settings.long_tokens, settings.long_answer, settings.longs_per_s)
    warming = [_request(draw, 0.3 * n, 60, 8) for n in range(6)]
    if scenario.is_warm:
        warming += [_at(request, 2.0 + 2.5 * n) for n, request in enumerate(longs)]
    return Load(warming, chats, longs)


async def _measure(settings: Settings, scenario: Scenario, roles: Sequence[str], seed: int) -> Measured:
    load = make_load(settings, scenario, seed)
    async with _fleet(settings, scenario, roles) as (gateway, target):
        insist(await open_load(target, load.warming, _LIMIT_S), "warming up")
        num_before = await metric(gateway, "antiphon_split_prompts_total", missing=0.0)
        requests = sorted([*load.chats, *load.longs], key=lambda request: request.at_s)
        answers = await open_load(target, requests, _LIMIT_S)
        num_split = await metric(gateway, "antiphon_split_prompts_total", missing=0.0) - num_before
    longs = {id(request) for request in load.longs}
    kinds = [id(request) in longs for request in requests]
    measured = judge(settings, answers, kinds, num_split)
    progress(f"{', '.join(roles)}: {measured}")
    return measured


def judge(
    settings: Settings, answers: Sequence[Answer], are_long: Sequence[bool], num_split: float
) -> Measured:
    """The figures of one measurement. A wrong answer has an infinite wait and is not in time."""
    chats = [answer for answer, is_long in zip(answers, are_long, strict=True) if not is_long]
    longs = [answer for answer, is_long in zip(answers, are_long, strict=True) if is_long]
    in_time = [a for a in chats if _is_in_time(a, settings.chat_ttft_s, settings.tpot_s)]
    in_time += [a for a in longs if _is_in_time(a, settings.long_ttft_s, settings.tpot_s)]
    ends = [a.last_s for a in answers if a.last_s is not None]
    wall_s = max(ends, default=0.0) - min(a.at_s for a in answers)
    return Measured(
        chat_ttft_s=percentile([_ttft_s(a) for a in chats], 90),
        long_ttft_s=percentile([_ttft_s(a) for a in longs], 50),
        gap_s=percentile([gap for a in chats for gap in a.gaps_s], 99),
        goodput_per_s=len(in_time) / wall_s if wall_s > 0 else 0.0,
        num_split=num_split,
    )


def _is_in_time(answer: Answer, ttft_s: float, tpot_s: float) -> bool:
    return answer.fault is None and answer.ttft_s <= ttft_s and answer.tpot_s <= tpot_s


def _ttft_s(answer: Answer) -> float:
    return float("inf") if answer.fault is not None else answer.ttft_s


@asynccontextmanager
async def _fleet(
    settings: Settings, scenario: Scenario, roles: Sequence[str]
) -> AsyncIterator[tuple[Server, Target]]:
    """Fresh workers of these roles, a Redis if the scenario has one, and a gateway in front of them."""
    async with AsyncExitStack() as stack:
        fleet = stack.enter_context(commands.fleet(_MODEL, catalogue=settings.catalogue))
        tiers = NO_TIERS
        if scenario.has_redis:
            store = await stack.enter_async_context(redis_server(settings.redis_mib))
            tiers = Tiers(store.url, 0)
        made = [fleet.worker(settings.shape, tiers=tiers, role=role) for role in roles]
        for command in made:
            await stack.enter_async_context(running(command))
        gateway = await stack.enter_async_context(running(fleet.gateway(*made)))
        await linked(gateway, len(made))
        yield gateway, Target(gateway.url)


def _request(draw: random.Random, at_s: float, num_prompt: int, num_answer: int) -> Request:
    body = {
        "model": _MODEL,
        "prompt": "".join(draw.choices(_LETTERS, k=num_prompt)),
        "max_tokens": num_answer,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(at_s, "/v1/completions", msgspec.json.encode(body), num_answer)


def _at(request: Request, at_s: float) -> Request:
    return Request(at_s, request.path, request.body, request.num_tokens)


_FIGURES = (
    ("ttft_chat", "TTFT p90 of chats", "chat_ttft_s"),
    ("ttft_long", "TTFT p50 of long prompts", "long_ttft_s"),
    ("gap", "p99 between two tokens of a chat", "gap_s"),
    ("goodput", "requests a second within the limits", "goodput_per_s"),
)


def _figures(scenario: Scenario, pairs: Pairs[Measured]) -> list[Figure]:
    """Ours ÷ theirs; goals only where splitting is meant to pay."""
    goals = {"gap": "<= 0.5", "goodput": ">= 1.0"} if scenario.name.startswith("mixed") else {}
    return [
        figure(
            f"{scenario.name}_{name}",
            pairs.ratio(operator.attrgetter(what)),
            f"{text}; {scenario.title}; roles of their own ÷ workers for both",
            goals.get(name),
        )
        for name, text, what in _FIGURES
        if scenario.has_longs or name != "ttft_long"
    ]


def _row(side: Sequence[Measured]) -> dict[str, Value]:
    return {
        "TTFT p90 of chats, s": rounded(median_of(side, lambda m: m.chat_ttft_s)),
        "TTFT p50 of long prompts, s": rounded(median_of(side, lambda m: m.long_ttft_s)),
        "p99 between tokens of a chat, s": rounded(median_of(side, lambda m: m.gap_s)),
        "requests/s within the limits": rounded(median_of(side, lambda m: m.goodput_per_s)),
        "prompts split": rounded(median_of(side, lambda m: m.num_split)),
    }


def _shown(value: object) -> Value:
    """A setting; a range as its two ends."""
    return value if isinstance(value, int | float) else str(value)
