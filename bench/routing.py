"""`bench routing`: routing policies side by side on public traces, on virtual time.

The product's own policies route every request of a trace between ten replicas (routing_replica.py), once
with a shared store and once without. They see what a gateway would: reports that are up to `report_s` old,
plus what was sent since. The bound is one LRU cache of all the memory there is. Busiest ÷ mean is taken
of three loads, the worst of which counts: requests, seconds at work, and sequences there on average.
Last comes a quiet day: a tenth of the pace, all prompts with a long beginning in common, no store; nobody
is ever too busy there, and a policy that looks at prefixes only sends all to the first who has it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from antiphon.router.policy import Ask, Overlap, Policy, Reason, ReplicaState, Route, pick_of
from antiphon.router.rivals import PolicyName, policy_named
from bench.load import percentile
from bench.machine import describe
from bench.pairs import progress
from bench.report import Run, Value, figure, rounded, today
from bench.routing_replica import Lru, Pace, Replica
from bench.routing_trace import BLOCK_TOKENS, CONVERSATION, SYNTHETIC, Request, read

OURS = PolicyName.COST.value
RANDOM = "random"
LONGEST_PREFIX = "longest-prefix"
SIDES = (OURS, RANDOM, *(name.value for name in PolicyName if name is not PolicyName.COST), LONGEST_PREFIX)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    num_replicas: int = 10
    replica_tokens: int = 3_000_000
    store_tokens: int = 30_000_000
    report_s: float = 0.1
    quiet_factor: float = 10.0
    quiet_shared_blocks: int = 8
    seed: int = 1
    most_requests: int | None = None

    @classmethod
    def quick(cls) -> Settings:
        return cls(most_requests=2000)


class RandomPolicy:
    """Anybody."""

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        return Route(states[pick_of(len(states), draw)].replica, Reason.RANDOM_TIE) if states else None


class LongestPrefix:
    """Whoever has most of the prompt, whatever there is to do; among equals the least loaded."""

    def choose(
        self, ask: Ask, states: Sequence[ReplicaState], overlaps: Sequence[Overlap], draw: float
    ) -> Route | None:
        """The route, None where there are no states."""
        ranks = [(-o.local_blocks, s.sequences) for s, o in zip(states, overlaps, strict=True)]
        best = [index for index, rank in enumerate(ranks) if rank == min(ranks)]
        return Route(states[best[pick_of(len(best), draw)]].replica, Reason.PREFIX) if best else None


@dataclass(slots=True)
class View:
    """What the gateway knows of one replica: its last report, and what was sent since."""

    report: ReplicaState
    num_sent: int = 0
    sent_tokens: int = 0

    def state(self) -> ReplicaState:
        return msgspec.structs.replace(
            self.report, dispatched=self.num_sent, dispatched_tokens=self.sent_tokens
        )


@dataclass(slots=True)
class Outcome:
    """What one policy made of one trace."""

    hit_rate: float
    ttfts_s: list[float]
    busiest: dict[str, float] = field(default_factory=dict)  # ÷ mean, by kind of load
    reasons: dict[Reason, int] = field(default_factory=dict)

    @property
    def worst_busiest(self) -> float:
        return max(self.busiest.values())

    def row(self) -> dict[str, Value]:
        return {
            "hit rate": rounded(self.hit_rate),
            **{f"TTFT p{p} s": rounded(percentile(self.ttfts_s, p)) for p in (50, 90, 99)},
            **{f"busiest ÷ mean, {kind}": rounded(value) for kind, value in self.busiest.items()},
        }


def run(settings: Settings, folder: Path | None, *, is_quick: bool) -> Run:
    """All policies on both traces, with and without a store. Raises BenchFault without the traces."""
    traces = {
        "conversation": read(folder, CONVERSATION, settings.most_requests),
        "synthetic": read(folder, SYNTHETIC, settings.most_requests),
    }
    raw: dict[str, dict[str, Value]] = {}
    figures = []
    for trace, requests in traces.items():
        bound = one_cache_hit_rate(
            requests, (settings.store_tokens + settings.num_replicas * settings.replica_tokens)
        )
        raw[f"{trace}, one cache of all memory"] = {"hit rate": rounded(bound)}
        kinds: dict[str, dict[str, Outcome]] = {}
        for kind in ("with store", "without"):
            kinds[kind] = {}
            for side in SIDES:
                progress(f"{trace}, {kind}, {side}")
                outcome = replay(requests, side_named(side), settings, has_store=kind == "with store")
                kinds[kind][side] = outcome
                raw[f"{trace}, {kind}, {side}"] = outcome.row()
        shared, apart = kinds["with store"], kinds["without"]
        figures += [
            figure(
                f"{trace}_hits_of_one_cache",
                shared[OURS].hit_rate / bound,
                f"{trace}: block hit rate, ours with the store ÷ one LRU cache of all the memory",
                ">= 0.95",
            ),
            figure(
                f"{trace}_hits_of_random",
                apart[OURS].hit_rate / apart[RANDOM].hit_rate,
                f"{trace}: block hit rate without a store, ours ÷ random",
                ">= 2.0",
            ),
            figure(
                f"{trace}_busiest",
                max(shared[OURS].worst_busiest, apart[OURS].worst_busiest),
                f"{trace}: load of the busiest replica ÷ mean, the worst of all kinds",
                "<= 1.25",
            ),
            figure(
                f"{trace}_ttft_of_best_rival",
                max(_ttft_of_best_rival(shared), _ttft_of_best_rival(apart)),
                f"{trace}: TTFT p90, ours ÷ the best rival's, the worse of with and without a store",
                "<= 1.0",
            ),
        ]
    quiet = quiet_day(traces["conversation"], settings)
    for side in (OURS, PolicyName.SESSION.value, LONGEST_PREFIX):
        progress(f"quiet day, {side}")
        outcome = replay(quiet, side_named(side), settings, has_store=False)
        raw[f"quiet day, {side}"] = outcome.row()
        if side == OURS:
            meaning = (
                "a quiet day with a long prompt in common: busiest replica ÷ mean, the worst of all kinds"
            )
            figures.append(figure("quiet_busiest", outcome.worst_busiest, meaning, "<= 1.5"))
    return Run(
        bench="routing",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings={**asdict(settings), **asdict(Pace())},
        figures=figures,
        raw=raw,
    )


def quiet_day(requests: Sequence[Request], settings: Settings) -> list[Request]:
    """The same requests, rarer, each after the same few blocks."""
    shared = tuple(range(-settings.quiet_shared_blocks, 0))
    return [
        replace(
            request,
            at_s=request.at_s * settings.quiet_factor,
            num_tokens=request.num_tokens + len(shared) * BLOCK_TOKENS,
            blocks=shared + request.blocks,
        )
        for request in requests
    ]


def side_named(name: str) -> Policy:
    """A policy of the product, or one that only stands here to be compared with."""
    if name == RANDOM:
        return RandomPolicy()
    return LongestPrefix() if name == LONGEST_PREFIX else policy_named(PolicyName(name))


def replay(
    requests: Sequence[Request],
    policy: Policy,
    settings: Settings,
    *,
    has_store: bool,
    pace: Pace | None = None,
) -> Outcome:
    """Route a whole trace."""
    pace = pace or Pace(num_blocks=settings.replica_tokens // BLOCK_TOKENS)
    store = Lru(settings.store_tokens // BLOCK_TOKENS) if has_store else None
    replicas = [Replica(pace, store) for _ in range(settings.num_replicas)]
    views = [View(replica.state(number)) for number, replica in enumerate(replicas)]
    draw = random.Random(settings.seed).random
    reasons: dict[Reason, int] = {}
    last_report = -1.0
    for request in requests:
        report = math.floor(request.at_s / settings.report_s)
        if report > last_report:
            for number, replica in enumerate(replicas):
                replica.advance(report * settings.report_s)
                views[number] = View(replica.state(number))
            last_report = report
        for replica in replicas:
            replica.advance(request.at_s)
        route = policy.choose(
            Ask(request.num_tokens, BLOCK_TOKENS, session=request.session),
            [view.state() for view in views],
            [replica.overlap(request.blocks) for replica in replicas],
            draw(),
        )
        assert route is not None
        reasons[route.reason] = reasons.get(route.reason, 0) + 1
        views[route.replica].num_sent += 1
        views[route.replica].sent_tokens += route.num_uncached
        replicas[route.replica].take(request)
    for replica in replicas:
        replica.advance(requests[-1].at_s + _PATIENCE_S)
    return _outcome(replicas, reasons)


_PATIENCE_S = 1e5  # by then every prompt is computed, however bad the policy


def _outcome(replicas: Sequence[Replica], reasons: dict[Reason, int]) -> Outcome:
    jobs = [job for replica in replicas for job in replica.ended]
    loads = {
        "requests": [float(replica.num_taken) for replica in replicas],
        "work": [replica.busy_s for replica in replicas],
        "sequences": [replica.sequence_s for replica in replicas],
    }
    return Outcome(
        hit_rate=sum(job.num_cached for job in jobs) / sum(len(job.request.blocks) for job in jobs),
        ttfts_s=sorted(job.first_s - job.request.at_s for job in jobs),
        busiest={kind: max(each) * len(each) / sum(each) for kind, each in loads.items()},
        reasons=dict(sorted(reasons.items())),
    )


def one_cache_hit_rate(requests: Sequence[Request], num_tokens: int) -> float:
    """Of one LRU cache so large, for all requests in their order."""
    cache = Lru(num_tokens // BLOCK_TOKENS)
    num_hits = 0
    for request in requests:
        num_hits += cache.match(request.blocks)
        cache.put(request.blocks)
    return num_hits / sum(len(request.blocks) for request in requests)


def _ttft_of_best_rival(outcomes: dict[str, Outcome]) -> float:
    ttfts = {side: percentile(outcome.ttfts_s, 90) for side, outcome in outcomes.items()}
    return ttfts.pop(OURS) / min(ttfts.values())
