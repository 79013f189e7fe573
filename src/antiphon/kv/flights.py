"""Which blocks are being fetched, for whom, and until when: the books of the fetcher.

A job is a run of blocks that one thread fetches in order. A waiter is a generation that wants a run; it
is served by the jobs that carry its blocks, its own or those begun for others: no block is fetched
twice at a time. A waiter is done when everything came, when the next block it needs will not come, or
at its deadline, and leaves the books in that moment, so that it is told exactly once.

The deadline moves: `patience_s`, plus what the blocks that came have saved already: its own, and those of
generations before it, which the engine would have computed first. So nobody ever ends later than computing
everything would have, plus the patience; a fetch that is worth it may be long, and may wait its turn.

Pure; not thread-safe: the fetcher's lock guards it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import KvBlock
from antiphon.kv.hosttier import Payload


class Outcome(enum.StrEnum):
    """Why a wait ended, in the words of `KvReport.decision`."""

    FETCHED = "fetched"  # everything, or what lay before the first block missing
    MISSED = "missed"  # the first block was not there
    LATE = "late"  # the deadline came first
    FAULT = "fault"


@dataclass(slots=True, eq=False)
class Job:
    """Blocks to fetch in order; the first `num_landed` are done with."""

    blocks: Sequence[KvBlock]
    num_landed: int = 0
    waiters: set[Waiter] = field(default_factory=set)
    asked_s: float | None = None  # when the store was asked for what it has not answered yet


@dataclass(slots=True, eq=False)
class Waiter:
    """A generation that waits for `blocks`; the first `num_ready` have come."""

    generation: str
    blocks: Sequence[KvBlock]
    started_s: float
    patience_s: float
    block_s: float  # what computing one block would take
    done: Callable[[Waiter], None]
    payloads: dict[BlockHash, Payload] = field(default_factory=dict)
    jobs: set[Job] = field(default_factory=set)
    num_ready: int = 0
    number: int = 0  # in order of coming
    num_before: int = 0  # blocks that came meanwhile for those before it, and not for it
    outcome: Outcome = Outcome.FETCHED

    @property
    def deadline_s(self) -> float:
        return self.started_s + self.patience_s + (self.num_ready + self.num_before) * self.block_s

    @property
    def ready(self) -> list[tuple[KvBlock, Payload]]:
        return [(block, self.payloads[block.hash]) for block in self.blocks[: self.num_ready]]


class Flights:
    """Open jobs and waiters."""

    def __init__(self) -> None:
        self._carriers: dict[BlockHash, Job] = {}
        self._waiters: dict[str, Waiter] = {}
        self._num_opened = 0

    @property
    def num_blocks(self) -> int:
        """Blocks still to come."""
        return len(self._carriers)

    @property
    def num_waiters(self) -> int:
        return len(self._waiters)

    @property
    def next_deadline_s(self) -> float | None:
        return min((waiter.deadline_s for waiter in self._waiters.values()), default=None)

    def count_new(self, blocks: Sequence[KvBlock]) -> int:
        """How many of these nobody is fetching yet."""
        return sum(block.hash not in self._carriers for block in blocks)

    def open(self, waiter: Waiter) -> list[Job]:
        """Take a waiter in, in place of an older one. Returns the new jobs, in the order of its blocks."""
        self.cancel(waiter.generation)
        self._waiters[waiter.generation] = waiter
        self._num_opened += 1
        waiter.number = self._num_opened
        jobs: list[Job] = []
        run: list[KvBlock] = []
        for block in waiter.blocks:
            carrier = self._carriers.get(block.hash)
            if carrier is None:
                run.append(block)
                continue
            self._join(waiter, carrier)
            jobs += self._job(waiter, run)
            run = []
        return jobs + self._job(waiter, run)

    def is_wanted(self, job: Job) -> bool:
        """Whether anybody still waits for this job."""
        return bool(job.waiters)

    def time_left_s(self, job: Job, now: float) -> float:
        """Until the last of those who wait for it gives up."""
        return max((waiter.deadline_s - now for waiter in job.waiters), default=0.0)

    def land(self, job: Job, payloads: Sequence[Payload], end: Outcome | None = None) -> list[Waiter]:
        """The next blocks of a job came; with `end` no more of it will. Returns who is done."""
        waiters = list(job.waiters)
        landed = job.blocks[job.num_landed : job.num_landed + len(payloads)]
        for block, payload in zip(landed, payloads, strict=True):
            del self._carriers[block.hash]
            for waiter in waiters:
                waiter.payloads[block.hash] = payload
        job.num_landed += len(payloads)
        self._credit(job, len(payloads))
        if end is not None:
            for block in job.blocks[job.num_landed :]:
                del self._carriers[block.hash]
        if end is not None or job.num_landed == len(job.blocks):
            for waiter in waiters:
                waiter.jobs.discard(job)
            job.waiters.clear()
        return [waiter for waiter in waiters if self._advance(waiter, end)]

    def overdue(self, now: float) -> tuple[list[Waiter], list[Job]]:
        """Those whose deadline has passed, with what came in time, and the jobs they waited for."""
        late = [waiter for waiter in self._waiters.values() if waiter.deadline_s <= now]
        jobs = {job: None for waiter in late for job in waiter.jobs}
        for waiter in late:
            waiter.outcome = Outcome.LATE
            self._leave(waiter)
        return late, list(jobs)

    def cancel(self, generation: str) -> None:
        """Forget a waiter; what is fetched for it alone ends with its batch."""
        waiter = self._waiters.get(generation)
        if waiter is not None:
            self._leave(waiter)

    def end_all(self) -> list[Waiter]:
        """Everybody, told that the store is gone."""
        waiters = list(self._waiters.values())
        for waiter in waiters:
            waiter.outcome = Outcome.FAULT
            self._leave(waiter)
        return waiters

    def _credit(self, job: Job, num_blocks: int) -> None:
        """Blocks came for somebody: those behind may wait as much longer as computing them takes."""
        first = min((waiter.number for waiter in job.waiters), default=self._num_opened)
        for waiter in self._waiters.values():
            if waiter.number > first and waiter not in job.waiters:
                waiter.num_before += num_blocks

    def _advance(self, waiter: Waiter, end: Outcome | None) -> bool:
        blocks = waiter.blocks
        while waiter.num_ready < len(blocks) and blocks[waiter.num_ready].hash in waiter.payloads:
            waiter.num_ready += 1
        if waiter.num_ready < len(blocks):
            if blocks[waiter.num_ready].hash in self._carriers:
                return False
            is_cut = end in (Outcome.LATE, Outcome.FAULT)
            waiter.outcome = end if end is not None and (is_cut or not waiter.num_ready) else Outcome.FETCHED
        self._leave(waiter)
        return True

    def _job(self, waiter: Waiter, run: list[KvBlock]) -> list[Job]:
        if not run:
            return []
        job = Job(tuple(run))
        self._carriers.update((block.hash, job) for block in run)
        self._join(waiter, job)
        return [job]

    def _join(self, waiter: Waiter, job: Job) -> None:
        job.waiters.add(waiter)
        waiter.jobs.add(job)

    def _leave(self, waiter: Waiter) -> None:
        del self._waiters[waiter.generation]
        for job in waiter.jobs:
            job.waiters.discard(waiter)
        waiter.jobs.clear()
