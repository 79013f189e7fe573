"""`bench routing-live`: routing policies side by side, before real workers near saturation.

Four workers run the scripted model, whose steps take as long as a real one's would (a part for the step,
for each prompt token, for each sequence that decodes); everything else, gateway, links, scheduler, block
sharing, eviction, is the product. Chats arrive at random, say several turns with pauses between them, and
their KV together is more than one worker holds: whoever sends a turn to another worker computes its
history again. There is no Redis and no host tier: what is compared is where requests go.

Every policy gets the same chats on fresh workers. Goodput: turns a second whose first token came within
the limit, and whose tokens then came fast enough. Turns are counted from the moment they were due.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace

import msgspec

from bench import commands
from bench.client import Answer, Request, Target, send
from bench.commands import Shape, Tiers
from bench.conversations import read
from bench.load import percentile, poisson
from bench.machine import describe
from bench.metrics import linked, num_computed
from bench.pairs import median_of, progress
from bench.report import Run, Value, figure, rounded, today
from bench.servers import Server, running
from bench.sides import served_model

OURS = "cost"
RIVALS = ("round-robin", "power-of-two", "session")
_LETTERS = "etaoin shrdlu"

_CATALOGUE = """[[model]]
name = "live"
engine = "scripted"
script = "babble"
context = 16384
step_s = {step_s}
prefill_token_s = {prefill_token_s}
decode_row_s = {decode_row_s}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench. Tokens of this model are bytes. Lengths of chats and turns are drawn evenly."""

    num_rounds: int = 2
    num_workers: int = 4
    kv_tokens: int = 96_000  # of a worker
    max_sequences: int = 16
    step_s: float = 0.008
    prefill_token_s: float = 0.0002  # 5,000 prompt tokens a second
    decode_row_s: float = 0.0005
    num_chats: int = 90
    chats_per_s: float = 2.2
    turns: tuple[int, int] = (4, 10)
    system_tokens: int = 400  # the same for all chats
    first_tokens: tuple[int, int] = (1200, 3200)
    later_tokens: tuple[int, int] = (150, 450)
    answer_tokens: int = 48
    think_s: tuple[float, float] = (1.0, 4.0)
    ttft_limit_s: float = 0.8
    tpot_limit_s: float = 0.06

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_rounds=1, num_chats=24, turns=(3, 5))

    @property
    def shape(self) -> Shape:
        return Shape(
            num_streams=self.max_sequences, context_tokens=16384, threads=None, kv_tokens=self.kv_tokens
        )

    @property
    def catalogue(self) -> str:
        return _CATALOGUE.format(
            step_s=self.step_s, prefill_token_s=self.prefill_token_s, decode_row_s=self.decode_row_s
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A chat to come: when it begins, what its user says, how long they think before each turn."""

    name: str
    at_s: float
    user_turns: tuple[str, ...]
    think_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a policy made of the chats."""

    ttft_p50_s: float
    ttft_p90_s: float
    goodput_per_s: float
    spared: float  # share of prompt tokens that were not computed
    busiest: float  # prompt tokens computed, busiest worker ÷ mean


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure every policy `num_rounds` times, in another order each time."""
    measured: dict[str, list[Measured]] = {name: [] for name in (OURS, *RIVALS)}
    for seed in range(settings.num_rounds):
        plans = plan_chats(settings, seed)
        order = [OURS, *RIVALS]
        random.Random(seed).shuffle(order)
        for name in order:
            measured[name].append(await _measure(settings, name, plans))
            progress(f"round {seed + 1}, {name}: {measured[name][-1]}")
    return Run(
        bench="routing-live",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={name: _shown(value) for name, value in asdict(settings).items()},
        figures=[
            figure(
                f"{what}_of_{rival.replace('-', '_')}",
                _ratio(measured[OURS], measured[rival], what),
                f"{text}, ours ÷ {rival}",
                ">= 2.0" if (what, rival) == ("goodput_per_s", "round-robin") else goal,
            )
            for what, text, goal in (
                ("ttft_p90_s", "TTFT p90", "<= 1.0"),
                ("goodput_per_s", "turns a second within the limits", ">= 1.0"),
            )
            for rival in RIVALS
        ],
        raw={name: _row(rounds) for name, rounds in measured.items()},
    )


def plan_chats(settings: Settings, seed: int) -> list[Plan]:
    """The chats of a round."""
    draw = random.Random(f"routing-live {seed}")
    plans = []
    for number, at_s in enumerate(poisson(draw, settings.num_chats, settings.chats_per_s)):
        num_turns = draw.randint(*settings.turns)
        lengths = [
            draw.randint(*(settings.later_tokens if turn else settings.first_tokens))
            for turn in range(num_turns)
        ]
        plans.append(
            Plan(
                f"{seed}-{number}",
                at_s,
                tuple(_text(draw, length) for length in lengths),
                (0.0, *(draw.uniform(*settings.think_s) for _ in range(num_turns - 1))),
            )
        )
    return plans


async def _measure(settings: Settings, policy: str, plans: Sequence[Plan]) -> Measured:
    async with _fleet(settings, policy) as (workers, target):
        model = await served_model(target)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        chats = [_converse(settings, target, model, plan, started_s) for plan in plans]
        turns = [answer for answers in await asyncio.gather(*chats) for answer in answers]
        wall_s = loop.time() - started_s
        computed = [await num_computed(worker) for worker in workers]
    in_time = [
        a
        for a in turns
        if a.fault is None and a.ttft_s <= settings.ttft_limit_s and a.tpot_s <= settings.tpot_limit_s
    ]
    ttfts = [float("inf") if a.fault is not None else a.ttft_s for a in turns]
    num_prompt_tokens = sum(a.num_prompt_tokens for a in turns)
    return Measured(
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        goodput_per_s=len(in_time) / wall_s,
        spared=1 - sum(computed) / num_prompt_tokens,
        busiest=max(computed) * len(computed) / sum(computed),
    )


@asynccontextmanager
async def _fleet(settings: Settings, policy: str) -> AsyncIterator[tuple[list[Server], Target]]:
    """Fresh workers and a gateway with this policy in front of them."""
    async with AsyncExitStack() as stack:
        fleet = stack.enter_context(commands.fleet("live", catalogue=settings.catalogue))
        made = [fleet.worker(settings.shape, tiers=Tiers("none", 0)) for _ in range(settings.num_workers)]
        workers = [await stack.enter_async_context(running(command)) for command in made]
        gateway = await stack.enter_async_context(running(fleet.gateway(*made, routing=policy)))
        await linked(gateway, settings.num_workers)
        yield workers, Target(gateway.url)


async def _converse(
    settings: Settings, target: Target, model: str, plan: Plan, started_s: float
) -> list[Answer]:
    """All turns of a chat. A turn is due when its user has thought; a failed one ends the chat."""
    loop = asyncio.get_running_loop()
    draw = random.Random("the system prompt of all chats")
    messages = [{"role": "system", "content": _text(draw, settings.system_tokens)}]
    answers: list[Answer] = []
    due_s = plan.at_s
    for user, think_s in zip(plan.user_turns, plan.think_s, strict=True):
        messages.append({"role": "user", "content": user})
        due_s += think_s
        await asyncio.sleep(max(0.0, started_s + due_s - loop.time()))
        request = _request(model, messages, plan.name, settings.answer_tokens)
        answers.append(await send(target, replace(request, at_s=due_s), started_s, 120.0))
        if answers[-1].fault is not None:
            break
        messages.append({"role": "assistant", "content": read(answers[-1]).text})
        due_s = loop.time() - started_s
    return answers


def _request(model: str, messages: list[dict[str, str]], chat: str, num_tokens: int) -> Request:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": 0,
        "prompt_cache_key": chat,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(0.0, "/v1/chat/completions", msgspec.json.encode(body), num_tokens, keeps_events=True)


def _text(draw: random.Random, num_tokens: int) -> str:
    return "".join(draw.choices(_LETTERS, k=num_tokens))


def _ratio(ours: Sequence[Measured], theirs: Sequence[Measured], what: str) -> float:
    pairs = zip(ours, theirs, strict=True)
    ratios = [getattr(a, what) / max(getattr(b, what), 1e-9) for a, b in pairs]
    return median_of(ratios, float)


def _row(rounds: Sequence[Measured]) -> dict[str, Value]:
    return {
        "TTFT p50, s": rounded(median_of(rounds, lambda m: m.ttft_p50_s)),
        "TTFT p90, s": rounded(median_of(rounds, lambda m: m.ttft_p90_s)),
        "turns/s within the limits": rounded(median_of(rounds, lambda m: m.goodput_per_s)),
        "share not computed": rounded(median_of(rounds, lambda m: m.spared)),
        "busiest worker ÷ mean": rounded(median_of(rounds, lambda m: m.busiest)),
    }


def _shown(value: object) -> Value:
    """A setting; a range as its two ends."""
    return value if isinstance(value, int | float) else str(value)
