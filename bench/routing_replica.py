"""A replica and a store on virtual time, as far as routing can tell them from real ones.

A replica computes prompts one after the other, in chunks that share their steps with all running answers;
every answer gets a token a step. Between two events (a prompt or an answer ends, a fetch arrives) the
pace is constant, so an event costs the same however many steps lie between. Caches are LRU over blocks;
a prompt's blocks are there when it is computed, and then in the store too.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from antiphon.core.generation import WorkerRates
from antiphon.router.cost import cost
from antiphon.router.policy import Ask, Overlap, ReplicaState
from bench.routing_trace import BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True)
class Pace:
    """What a replica can do. The defaults: a model of 70 G parameters on one machine of eight GPUs.

    Its KV: 160 kB a token (80 layers, 8 heads of 128, FP8), so 84 MB a block; the store at 5 GB/s.
    """

    prefill_tokens_per_s: float = 6000.0
    step_s: float = 0.02  # of one answer
    sequence_s: float = 0.0003  # more for each other one
    chunk_tokens: int = 512
    store_rtt_s: float = 0.001
    store_blocks_per_s: float = 60.0
    import_s_per_block: float = 0.002
    num_blocks: int = 3_000_000 // BLOCK_TOKENS
    max_sequences: int = 64

    @property
    def rates(self) -> WorkerRates:
        """What the worker would report of itself."""
        return WorkerRates(
            self.prefill_tokens_per_s,
            self.step_s,
            self.store_rtt_s,
            self.store_blocks_per_s,
            self.import_s_per_block,
        )


class Lru:
    """Block ids, the least recently used thrown out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[int], start: int = 0) -> int:
        """How many from `start` on are there without a gap."""
        held = self._blocks
        for index in range(start, len(blocks)):
            if blocks[index] not in held:
                return index - start
        return max(len(blocks) - start, 0)

    def put(self, blocks: Sequence[int]) -> None:
        """Deepest first, so that a chain is thrown out from its end."""
        held = self._blocks
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._most:
            held.popitem(last=False)


@dataclass(slots=True)
class Job:
    """A request at its replica, and what became of it."""

    request: Request
    number: int  # of its replica's
    num_fetched: int = 0  # blocks, after those it had when the request came
    num_cached: int = 0  # blocks that were not computed, when it is known
    left_tokens: float = 0.0  # of the prompt
    num_blocks: int = 0
    first_s: float = math.nan  # the first token


@dataclass(slots=True)
class Replica:
    """One replica. Time moves in `advance`, and nowhere else."""

    pace: Pace
    store: Lru | None
    cache: Lru = field(init=False)
    now_s: float = 0.0
    busy_s: float = 0.0
    sequence_s: float = 0.0  # sequences there, summed over time
    num_taken: int = 0
    ended: list[Job] = field(default_factory=list)  # prompts computed
    _fetching: list[tuple[float, int, Job]] = field(default_factory=list)
    _store_free_s: float = 0.0
    _queue: deque[Job] = field(default_factory=deque)
    _prefilling: Job | None = None
    _tokens_each: float = 0.0  # how many tokens an answer that ran from the start would have
    _answers: list[tuple[float, int, Job]] = field(default_factory=list)  # by when they end, in such tokens
    _used_blocks: int = 0

    def __post_init__(self) -> None:
        self.cache = Lru(self.pace.num_blocks)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + len(self._fetching)

    @property
    def num_running(self) -> int:
        return len(self._answers) + (self._prefilling is not None)

    def overlap(self, blocks: Sequence[int]) -> Overlap:
        """What a directory would tell of a prompt."""
        local = self.cache.match(blocks)
        return Overlap(local, self.store.match(blocks, local) if self.store is not None else 0)

    def state(self, name: int) -> ReplicaState:
        """What the replica would report."""
        left = [*self._queue, *(job for _, _, job in self._fetching)]
        if self._prefilling is not None:
            left.append(self._prefilling)
        return ReplicaState(
            name,
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_tokens=int(sum(job.left_tokens for job in left)),
            free_blocks=max(self.pace.num_blocks - self._used_blocks, 0),
            num_blocks=self.pace.num_blocks,
            max_sequences=self.pace.max_sequences,
            rates=self.pace.rates,
            cached_blocks=min(len(self.cache), max(self.pace.num_blocks - self._used_blocks, 0)),
        )

    def take(self, request: Request) -> None:
        """A request comes, now. What the store has and supplies sooner than computing is fetched first."""
        self.num_taken += 1
        num_blocks = -(-(request.num_tokens + request.num_answer_tokens) // BLOCK_TOKENS)
        job = Job(request, self.num_taken, num_blocks=num_blocks)
        there = self.overlap(request.blocks)
        told = cost(Ask(request.num_tokens, BLOCK_TOKENS), self.state(0), there, self.pace.rates)
        job.left_tokens = told.num_uncached
        if not told.uses_store:
            self._queue.append(job)
            self._begin()
            return
        job.num_fetched = there.local_blocks + there.store_blocks
        fetch_s = there.store_blocks / self.pace.store_blocks_per_s
        fetch_s += self.pace.store_rtt_s + there.store_blocks * self.pace.import_s_per_block
        self._store_free_s = max(self._store_free_s, self.now_s) + fetch_s
        heappush(self._fetching, (self._store_free_s, job.number, job))

    def advance(self, to_s: float) -> None:
        """Let time pass."""
        while self.now_s < to_s:
            step_s = self._step_s()
            wait_s = to_s - self.now_s
            if self._fetching:
                wait_s = min(wait_s, self._fetching[0][0] - self.now_s)
            if self._prefilling is not None:
                wait_s = min(wait_s, self._prefilling.left_tokens / self.pace.chunk_tokens * step_s)
            if self._answers:
                wait_s = min(wait_s, (self._answers[0][0] - self._tokens_each) * step_s)
            self._pass(max(wait_s, _TICK_S), step_s)

    def _step_s(self) -> float:
        pace = self.pace
        alone_s = pace.step_s
        if self._prefilling is not None:
            alone_s = max(alone_s, pace.chunk_tokens / pace.prefill_tokens_per_s)
        return alone_s + pace.sequence_s * len(self._answers)

    def _pass(self, seconds: float, step_s: float) -> None:
        """So much time at this pace, and what ends with it."""
        self.now_s += seconds
        self.sequence_s += (self.num_running + self.num_waiting) * seconds
        if self.num_running:
            self.busy_s += seconds
        self._tokens_each += seconds / step_s
        while self._answers and self._answers[0][0] <= self._tokens_each + _ROUNDING:
            _, _, job = heappop(self._answers)
            self._used_blocks -= job.num_blocks
        while self._fetching and self._fetching[0][0] <= self.now_s + _TICK_S:
            self._queue.append(heappop(self._fetching)[2])
        if (job := self._prefilling) is not None:
            job.left_tokens -= seconds / step_s * self.pace.chunk_tokens
            if job.left_tokens <= _ROUNDING:
                self._prefilling = None
                self._answer(job)
        self._begin()

    def _begin(self) -> None:
        """Start on the next prompt where nothing keeps it from starting."""
        if self._prefilling is not None or not self._queue or self.num_running >= self.pace.max_sequences:
            return
        self._prefilling = job = self._queue.popleft()
        blocks = job.request.blocks
        job.num_cached = max(self.cache.match(blocks), job.num_fetched)
        job.left_tokens = max(job.request.num_tokens - job.num_cached * BLOCK_TOKENS, 1)
        self._used_blocks += job.num_blocks

    def _answer(self, job: Job) -> None:
        """Its prompt is computed: the first token is out."""
        job.first_s = self.now_s
        self.ended.append(job)
        self.cache.put(job.request.blocks)
        if self.store is not None:
            self.store.put(job.request.blocks)
        heappush(self._answers, (self._tokens_each + job.request.num_answer_tokens, job.number, job))


_TICK_S = 1e-7
_ROUNDING = 1e-6
