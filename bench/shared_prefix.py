"""`bench shared-prefix`: many chats that begin with one long system prompt, all cold at the start.

Figures: prompt tokens that our worker computed ÷ the distinct ones among all prompts (a token counts as
distinct once per different text before it: nodes of the prompts' prefix tree), and TTFT against
llama-server with the KV mode and number of slots that a sweep finds best, its prompt cache on. Every
pair draws a new system prompt, so nothing is warm. llama-server's tokenizer says what the prompts'
tokens are. Both serve the shipped file.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx2

from bench import commands
from bench.client import Request, Target
from bench.commands import KvMode, Shape
from bench.errors import BenchFault
from bench.load import Summary, Vocabulary, chats, insist, median, open_load, poisson, summarise
from bench.machine import describe
from bench.metrics import num_computed
from bench.pairs import in_pairs, median_of, progress
from bench.report import Run, Value, figure, rounded, today
from bench.servers import running
from bench.sides import served_model

_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the bench."""

    threads: int
    num_pairs: int = 2
    num_chats: int = 32
    system_tokens: int = 600
    user_tokens: int = 40
    answer_tokens: int = 32
    context_tokens: int = 1024
    arrivals_s: float = 1.0
    slots: tuple[int, ...] = (4, 32)  # of llama-server, tried in the sweep

    @classmethod
    def quick(cls, threads: int) -> Settings:
        return cls(threads=threads, num_pairs=1, num_chats=16, slots=(4,))

    def shape(self, num_streams: int) -> Shape:
        """A server with this many streams at once."""
        return Shape(num_streams=num_streams, context_tokens=self.context_tokens, threads=self.threads)

    def turns(self, seed: int) -> list[tuple[str, str]]:
        """System prompt and user turn of every chat."""
        draw, vocabulary = random.Random(f"chats {seed}"), Vocabulary()
        system = vocabulary.text(draw, self.system_tokens).strip()
        return [(system, vocabulary.text(draw, self.user_tokens).strip()) for _ in range(self.num_chats)]

    def load(self, model: str, seed: int) -> list[Request]:
        """The chats, arriving within `arrivals_s`."""
        draw = random.Random(f"arrivals {seed}")
        due_s = poisson(draw, self.num_chats, self.num_chats / self.arrivals_s)
        squeeze = min(1.0, self.arrivals_s / due_s[-1])
        return chats(
            [at_s * squeeze for at_s in due_s],
            self.turns(seed),
            model=model,
            answer_tokens=self.answer_tokens,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's part of a pair; `num_computed` is None for a server that does not tell."""

    summary: Summary
    num_computed: int | None


async def run(settings: Settings, binary: Path, *, is_quick: bool) -> Run:
    """Sweep llama-server, then measure both in pairs."""
    model = commands.shipped_model()
    raw: dict[str, dict[str, Value]] = {}
    mode, num_slots = await _sweep(settings, binary, model, raw)
    async with (
        commands.antiphon("smollm2", settings.shape(settings.num_chats), weights="as-is") as system,
        running(commands.llama_server(binary, model, settings.shape(num_slots), mode)) as server,
    ):
        name = await served_model(system.target)
        peer = Target(server.url)
        for target in (system.target, peer):
            await _chat(replace(settings, num_chats=2), target, name, -1)

        async def ours(seed: int) -> Measured:
            before = await num_computed(system.worker)
            summary = await _chat(settings, system.target, name, seed)
            return Measured(summary, await num_computed(system.worker) - before)

        async def theirs(seed: int) -> Measured:
            return Measured(await _chat(settings, peer, name, seed), None)

        pairs = await in_pairs(settings.num_pairs, ours, theirs)
        distinct = [
            await _num_distinct(peer, settings.turns(seed), measured.summary.num_prompt_tokens)
            for seed, measured in enumerate(pairs.ours)
        ]
    computed = median([(m.num_computed or 0) / num for m, num in zip(pairs.ours, distinct, strict=True)])
    for side_name, side in (("ours", pairs.ours), ("llama-server", pairs.peer)):
        raw[side_name] = {
            "TTFT p50 s": rounded(median_of(side, lambda m: m.summary.ttft_p50_s)),
            "TTFT p99 s": rounded(median_of(side, lambda m: m.summary.ttft_p99_s)),
            "wall s": rounded(median_of(side, lambda m: m.summary.wall_s)),
            "prompt tokens": side[0].summary.num_prompt_tokens,
        }
    raw["ours"]["computed"] = rounded(median_of(pairs.ours, lambda m: m.num_computed or 0), 6)
    raw["ours"]["distinct"] = distinct[0]
    ttft = pairs.ratio(lambda m: m.summary.ttft_p50_s)
    tail = pairs.ratio(lambda m: m.summary.ttft_p99_s)
    wall = pairs.ratio(lambda m: m.summary.wall_s)
    return Run(
        bench="shared-prefix",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={
            **asdict(settings),
            "slots": str(settings.slots),
            "llama-server": f"{num_slots} slots, {mode.name}",
        },
        figures=[
            figure("computed", computed, "prompt tokens computed ÷ distinct", "<= 1.1"),
            figure("ttft_p50", ttft, "TTFT p50, ours ÷ llama-server", "<= 0.5"),
            figure("ttft_p99", tail, "TTFT p99, ours ÷ llama-server"),
            figure("wall", wall, "time to answer all, ours ÷ llama-server"),
        ],
        raw=raw,
    )


async def _sweep(
    settings: Settings, binary: Path, model: Path, raw: dict[str, dict[str, Value]]
) -> tuple[KvMode, int]:
    """llama-server's KV mode and number of slots with the lowest TTFT p50 on this load.

    With few slots a later chat starts in the slot of an earlier one and finds the system prompt there;
    with one slot a chat nothing is shared, but nothing waits for a slot either.
    """
    found: list[tuple[float, KvMode, int]] = []
    for mode, num_slots in itertools.product(commands.MODES, settings.slots):
        command = commands.llama_server(binary, model, settings.shape(num_slots), mode)
        async with running(command) as server:
            summary = await _chat(settings, Target(server.url), "any", -2)
        name = f"sweep: llama-server, {num_slots} slots, {mode.name}"
        progress(f"{name}: TTFT p50 {summary.ttft_p50_s:.2f} s")
        raw[name] = {"TTFT p50 s": rounded(summary.ttft_p50_s), "wall s": rounded(summary.wall_s)}
        found.append((summary.ttft_p50_s, mode, num_slots))
    _, mode, num_slots = min(found, key=lambda one: one[0])
    return mode, num_slots


async def _chat(settings: Settings, target: Target, model: str, seed: int) -> Summary:
    answers = await open_load(target, settings.load(model, seed), _LIMIT_S)
    summary = summarise(insist(answers, target.url))
    progress(f"{target.url}: TTFT p50 {summary.ttft_p50_s:.2f} s, all answered in {summary.wall_s:.2f} s")
    return summary


async def _num_distinct(peer: Target, turns: Sequence[tuple[str, str]], num_prompt_tokens: int) -> int:
    """Distinct tokens of the rendered prompts. Raises BenchFault where both sides do not agree on them."""
    prompts = []
    async with httpx2.AsyncClient(trust_env=False, base_url=peer.url) as http:
        for system, user in turns:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            rendered = (await http.post("/apply-template", json={"messages": messages})).json()["prompt"]
            body = {"content": rendered, "add_special": False, "parse_special": True}
            prompts.append([int(t) for t in (await http.post("/tokenize", json=body)).json()["tokens"]])
    total = sum(map(len, prompts))
    if total != num_prompt_tokens:
        raise BenchFault(f"ours counts {num_prompt_tokens} prompt tokens, llama-server {total}")
    return num_distinct(prompts)


def num_distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Nodes of the prefix tree of these token sequences."""
    ordered = sorted(list(p) for p in prompts)
    total = len(ordered[0]) if ordered else 0
    for before, now in itertools.pairwise(ordered):
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))
        )
        total += len(now) - shared
    return total
