"""`bench kv-resume`: chats go on after their worker was killed, with KV from Redis against computing it.

Before every turn each of two workers is killed (SIGKILL) and started again: one with Redis, one without.
The gateways stay. Every chat takes its turn at the first one; at the second one all do in a full run and
some in a quick one, because computing their history takes seconds: their requests are the same, so each
makes a pair. The two take turns at going first. Chats go one after the other, so TTFT holds no queue.

    reused    prompt tokens that the worker with Redis did not compute, by its own count (its
              /metrics, not the usage it reports) ÷ those that stood in whole blocks of the chat's history
    texts     the same requests go to a third worker, which is never killed and keeps all KV in its
              engine. Answers are greedy. Where one differs from those of the other two, the gap between
              the two tokens is listed; wrong KV would show as a gap beyond a near-tie.

All serve the built-in model as it is served by default.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from bench import commands
from bench.client import Target
from bench.commands import Fleet, Shape, Tiers
from bench.conversations import Chat, Growth, Reply, ask, difference
from bench.load import median, percentile
from bench.machine import describe
from bench.metrics import linked, num_computed
from bench.pairs import progress
from bench.redisserver import RedisServer, redis_server
from bench.report import Run, Value, figure, rounded, today
from bench.servers import Command, Server, running
from bench.sides import served_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench. First turns grow evenly from the first chat to the last."""

    model: str = "smollm2"
    num_chats: int = 20
    num_turns: int = 6
    first_tokens: tuple[int, int] = (1000, 2000)
    paired_every: int = 1  # one chat of so many is also computed anew, and asked without a kill
    block_tokens: int = 32
    context_tokens: int = 4096
    num_streams: int = 4
    redis_mib: int = 2048
    host_mib: int = 512
    think_s: float = 0.5  # from the last answer of a turn to the kill

    @classmethod
    def quick(cls) -> Settings:
        return cls(num_chats=4, num_turns=3, first_tokens=(1000, 1400), paired_every=2)

    def chats(self) -> list[Chat]:
        """The chats, none of which has begun."""
        least, most = self.first_tokens
        step = (most - least) / max(1, self.num_chats - 1)
        return [
            Chat.draw(f"resume {number}", self.num_turns, Growth(first=round(least + number * step)))
            for number in range(self.num_chats)
        ]

    def is_paired(self, number: int) -> bool:
        """Whether this chat goes to all three workers: evenly spread over the lengths."""
        return number % self.paired_every == self.paired_every // 2


@dataclass(frozen=True, slots=True)
class Part:
    """One worker's part of a turn: its replies by chat, and the prompt tokens it computed."""

    replies: dict[int, Reply]
    num_computed: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(reply.answer.num_prompt_tokens for reply in self.replies.values())


@dataclass(frozen=True, slots=True)
class Turn:
    """All three parts of a turn. `num_reusable`: of the first part's prompts."""

    resumed: Part
    recomputed: Part
    unbroken: Part
    num_reusable: int

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """TTFT of the same request, resumed and recomputed."""
        return [
            (self.resumed.replies[number].answer.ttft_s, reply.answer.ttft_s)
            for number, reply in self.recomputed.replies.items()
        ]


@dataclass(frozen=True, slots=True)
class Mortal:
    """A gateway that stays, and its worker, which lives for one turn at a time."""

    gateway: Server
    worker: Command

    @property
    def target(self) -> Target:
        return Target(self.gateway.url)

    @asynccontextmanager
    async def life(self) -> AsyncIterator[Server]:
        """The worker from its start to its sudden end."""
        async with running(self.worker, stop=signal.SIGKILL) as worker:
            await linked(self.gateway)
            yield worker


@dataclass(frozen=True, slots=True)
class Systems:
    """All that is asked: with Redis, without, and the worker that is never killed."""

    resumed: Mortal
    recomputed: Mortal
    unbroken: Target
    steady: Server


@dataclass(slots=True)
class ResumeBench:
    """Takes all chats through their turns."""

    settings: Settings
    chats: list[Chat]
    raw: dict[str, dict[str, Value]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    async def run(self, *, is_quick: bool) -> Run:
        """The first turn, which is only prepared, then all later ones."""
        with commands.fleet(self.settings.model) as fleet:
            async with redis_server(self.settings.redis_mib) as store, self._systems(fleet, store) as systems:
                last = await self._first_turn(systems)
                for number in range(1, self.settings.num_turns):
                    turn = await self._turn(number, systems, last)
                    self.add(turn)
                    last = turn.resumed.replies
                self.raw["Redis"] = {"keys": store.num_keys(), "MiB": round(store.used_bytes() / 2**20)}
        return self.report(is_quick=is_quick)

    @asynccontextmanager
    async def _systems(self, fleet: Fleet, store: RedisServer) -> AsyncIterator[Systems]:
        settings = self.settings
        shape = Shape(num_streams=settings.num_streams, context_tokens=settings.context_tokens, threads=None)
        resumed = fleet.worker(shape, tiers=Tiers(store.url, settings.host_mib))
        recomputed = fleet.worker(shape, tiers=commands.NO_TIERS)
        room = settings.context_tokens * len(self._paired)
        unbroken = fleet.worker(replace(shape, kv_tokens=room), tiers=commands.NO_TIERS)
        async with (
            running(fleet.gateway(resumed)) as first,
            running(fleet.gateway(recomputed)) as second,
            running(fleet.gateway(unbroken)) as third,
            running(unbroken) as steady,
        ):
            await linked(third)
            yield Systems(Mortal(first, resumed), Mortal(second, recomputed), Target(third.url), steady)

    async def _first_turn(self, systems: Systems) -> dict[int, Reply]:
        progress("turn 1: nothing to reuse")
        part = await self._life(systems.resumed, range(len(self.chats)))
        await self._ask(systems.unbroken, systems.steady, self._paired)
        self._hear(part.replies)
        return part.replies

    async def _turn(self, number: int, systems: Systems, last: dict[int, Reply]) -> Turn:
        if number % 2:
            resumed = await self._life(systems.resumed, range(len(self.chats)))
            recomputed = await self._life(systems.recomputed, self._paired)
        else:
            recomputed = await self._life(systems.recomputed, self._paired)
            resumed = await self._life(systems.resumed, range(len(self.chats)))
        unbroken = await self._ask(systems.unbroken, systems.steady, self._paired)
        block_tokens = self.settings.block_tokens
        num_reusable = sum(r.num_computable // block_tokens * block_tokens for r in last.values())
        self._hear(resumed.replies)
        return Turn(resumed, recomputed, unbroken, num_reusable)

    @property
    def _paired(self) -> list[int]:
        return [number for number in range(len(self.chats)) if self.settings.is_paired(number)]

    async def _life(self, system: Mortal, chosen: Sequence[int]) -> Part:
        """Start the worker, take these chats' next turn there, kill it."""
        async with system.life() as worker:
            part = await self._ask(system.target, worker, chosen)
            await asyncio.sleep(self.settings.think_s)
        return part

    async def _ask(self, target: Target, worker: Server, chosen: Sequence[int]) -> Part:
        """The next turn of these chats, one after the other."""
        model = await served_model(target)
        before = await num_computed(worker)
        replies = {number: await ask(target, self.chats[number].request(model)) for number in chosen}
        return Part(replies, await num_computed(worker) - before)

    def _hear(self, replies: dict[int, Reply]) -> None:
        for number, reply in replies.items():
            self.chats[number].answers.append(reply.text)

    def add(self, turn: Turn) -> None:
        """Keep what the next turn brought: one row for it, and one for every answer that differs."""
        self.turns.append(turn)
        name = f"turn {len(self.turns) + 1}"
        prompts = turn.resumed.num_prompt_tokens
        ours, theirs = zip(*turn.pairs, strict=True)
        row: dict[str, Value] = {
            "TTFT p50 of all chats, s": rounded(percentile(_ttfts(turn.resumed), 50)),
            "TTFT p50, pairs, s": rounded(percentile(ours, 50)),
            "recomputed, s": rounded(percentile(theirs, 50)),
            "without a kill, s": rounded(percentile(_ttfts(turn.unbroken), 50)),
            "prompt tokens": prompts,
            "reusable": turn.num_reusable,
            "reused": prompts - turn.resumed.num_computed,
        }
        self.raw[name] = row
        progress(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
        for side, part in (("resumed", turn.resumed), ("recomputed", turn.recomputed)):
            for chat, reply in turn.unbroken.replies.items():
                found = difference(part.replies[chat].tokens, reply.tokens)
                if found is not None:
                    what = f"{name}, chat {chat + 1}: {side} differs from without a kill"
                    self.raw[what] = {"at token": found.position + 1, "gap, nats": rounded(found.gap)}
                    progress(f"{what} at token {found.position + 1}, gap {found.gap:.3f} nats")

    def report(self, *, is_quick: bool) -> Run:
        """The figures of all turns that were added."""
        pairs = [pair for turn in self.turns for pair in turn.pairs]
        ours, theirs = zip(*pairs, strict=True)
        of_p50 = percentile(ours, 50) / percentile(theirs, 50)
        of_pairs = median([a / b for a, b in pairs])
        reused = sum(turn.resumed.num_prompt_tokens - turn.resumed.num_computed for turn in self.turns)
        reusable = sum(turn.num_reusable for turn in self.turns)
        found = [
            difference(turn.resumed.replies[chat].tokens, reply.tokens)
            for turn in self.turns
            for chat, reply in turn.unbroken.replies.items()
        ]
        beyond = sum(1 for one in found if one is not None and not one.is_near_tie)
        settings = {**asdict(self.settings), "first_tokens": str(self.settings.first_tokens)}
        return Run(
            bench="kv-resume",
            date=today(),
            quick=is_quick,
            machine=describe(),
            settings={**settings, "pairs": len(pairs), "answers compared": len(found)},
            figures=[
                figure("ttft_p50", of_p50, "TTFT p50 of turns 2 on, Redis ÷ recompute", "<= 0.15"),
                figure("ttft_pairs", of_pairs, "TTFT of one request, Redis ÷ recompute, median"),
                figure("reused", reused / reusable, "tokens reused ÷ reusable", ">= 0.95"),
                figure("texts_wrong", beyond, "answers that differ by more than a near-tie", "<= 0"),
                figure(
                    "texts_equal", found.count(None) / len(found), "share of answers without a difference"
                ),
            ],
            raw=self.raw,
        )


def _ttfts(part: Part) -> list[float]:
    return [reply.answer.ttft_s for reply in part.replies.values()]
