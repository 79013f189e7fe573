"""Fetches blocks from the store on threads of its own, in time or not at all.

Owns the fetch threads, the timekeeper and the bounds on what is under way. Callers hand in runs of
blocks and are told once each, on a kv thread: by the fetch thread when the run is over, by the
timekeeper at the deadline, whatever the store does. Invariants: nothing here waits for the store but
the fetch threads; a payload is handed on only after the codec has proven it; bytes under way stay below
`most_bytes` (a longer run is cut to what fits).

While the breaker is open, or the gate said no, the store is measured off the request path: a ping, and
the first blocks that were wanted. So no request pays for finding out that the store healed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from antiphon.core.clock import Clock
from antiphon.core.kvblock import KvBlock
from antiphon.kv.breaker import Breaker
from antiphon.kv.codec import BlockCodec
from antiphon.kv.flights import Flights, Job, Outcome, Waiter
from antiphon.kv.gate import Ask, Gate
from antiphon.kv.probing import ProbePlan
from antiphon.kv.provenreader import FetchHooks, Got, ProvenReader
from antiphon.kv.store import BlockStore, FaultKind, StoreFault

_PROBE_TIMEOUT_S = 0.75
_PROBE_BYTES = 2 * 2**20
_GRACE = 0.125  # of the patience: what came by then can still be used by the deadline
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """The shape of a block, and bounds on what is under way."""

    block_tokens: int
    block_bytes: int
    num_threads: int = 2
    most_bytes: int = 256 * 2**20
    most_waiters: int = 256


@dataclass(slots=True)
class FetchCounts:
    """Totals since the start."""

    num_asked: int = 0  # blocks
    num_got: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # fetch threads' time in store and codec
    num_probes: int = 0
    faults: Counter[FaultKind] = field(default_factory=Counter)  # calls


@dataclass(frozen=True, slots=True)
class FetcherParts:
    """What a fetcher works with. `lock` guards gate and breaker, here and elsewhere."""

    store: BlockStore
    codec: BlockCodec
    gate: Gate
    breaker: Breaker
    clock: Clock
    lock: threading.Lock


class Fetcher:
    """`start` and `cancel` from any thread; `close` once."""

    def __init__(self, parts: FetcherParts, hooks: FetchHooks, settings: FetchSettings) -> None:
        self._store = parts.store
        self._reader = ProvenReader(parts.store, parts.codec, parts.clock, hooks)
        self._gate, self._breaker = parts.gate, parts.breaker
        self._clock = parts.clock
        self._hooks = hooks
        self._settings = settings
        self._lock = parts.lock
        self._work = threading.Condition(self._lock)
        self._tick = threading.Condition(self._lock)
        self._queue: deque[Job | None] = deque()  # None: a probe
        self._flights = Flights()
        self._probes = ProbePlan.starting(parts.breaker, parts.clock.now())
        self._is_closed = False
        self._counts = FetchCounts()
        loops = {"kv-time": self._keep_time}
        loops |= {f"kv-fetch-{number}": self._fetch for number in range(settings.num_threads)}
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes_under_way(self) -> int:
        return self._flights.num_blocks * self._settings.block_bytes

    def start(self, generation: str, blocks: Sequence[KvBlock], done: Callable[[Waiter], None]) -> str | None:
        """Fetch the first of these blocks that are there; `done` is called once, unless cancelled.

        Returns why not, in the words of `KvReport.decision`; then `done` is not called.
        """
        with self._lock:
            now = self._clock.now()
            fitting = self._fitting(blocks)
            refusal = self._refusal(fitting)
            if refusal is not None:
                self._plan_probe(blocks, now)
                return refusal
            self._probes.blocks = self._sample(blocks)
            patience_s = self._gate.settings.patience_s
            block_s = self._gate.compute_s(self._settings.block_tokens)
            waiter = Waiter(generation, fitting, now, patience_s, block_s, done)
            for job in self._flights.open(waiter):
                self._queue.append(job)
                self._work.notify()
            self._tick.notify()
        return None

    def cancel(self, generation: str) -> None:
        """Its `done` will not be called, unless that is happening just now."""
        with self._lock:
            self._flights.cancel(generation)

    def counts(self) -> FetchCounts:
        """The totals by now, as a copy."""
        with self._lock:
            return replace(
                self._counts, num_probes=self._probes.num_begun, faults=Counter(self._counts.faults)
            )

    def close(self) -> None:
        """Tell everybody who waits, and end the threads. The store is closed by its owner."""
        with self._lock:
            self._is_closed = True
            waiters = self._flights.end_all()
            self._work.notify_all()
            self._tick.notify_all()
        _tell(waiters)
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _fitting(self, blocks: Sequence[KvBlock]) -> Sequence[KvBlock]:
        room = self._settings.most_bytes // self._settings.block_bytes - self._flights.num_blocks
        if self._flights.count_new(blocks) <= room:
            return blocks
        return blocks[: max(room, 0)]

    def _refusal(self, fitting: Sequence[KvBlock]) -> str | None:
        if self._is_closed:
            return "no_store"
        if not self._breaker.is_closed:
            return "open_breaker"
        if not fitting or self._flights.num_waiters >= self._settings.most_waiters:
            return "busy"
        return None if self._gate.judge(self._ask(fitting)).fetch else "slower"

    def _ask(self, blocks: Sequence[KvBlock]) -> Ask:
        settings = self._settings
        num_joined = len(blocks) - self._flights.count_new(blocks)
        num_queued = self._flights.num_blocks - num_joined
        return Ask(
            len(blocks), settings.block_bytes, settings.block_tokens, num_queued * settings.block_bytes
        )

    def _plan_probe(self, refused: Sequence[KvBlock], now: float) -> None:
        """Measure the store with what was refused, where that could change the answer."""
        if self._gate.hopes(self._ask(refused)):
            self._probes.blocks = self._sample(refused)
            self._probes.refuse(now)
            self._tick.notify()

    def _sample(self, blocks: Sequence[KvBlock]) -> Sequence[KvBlock]:
        """So many of them that fetching them says something about the store."""
        return blocks[: max(1, _PROBE_BYTES // self._settings.block_bytes)]

    def _fetch(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._is_closed:
                    self._work.wait()
                if self._is_closed:
                    return
                job = self._queue.popleft()
            try:
                if job is None:
                    self._probe()
                else:
                    self._serve(job)
            except Exception as error:  # noqa: BLE001 - a fault of ours costs a fetch, not the thread
                self._give_up(job, error)

    def _give_up(self, job: Job | None, error: Exception) -> None:
        """What nobody expected counts as a failure of the store: whoever waits is told, it is rested."""
        fault = StoreFault(FaultKind.OTHER, f"{type(error).__name__}: {error}")
        self._hooks.failed(fault)
        waiters: Sequence[Waiter] = ()
        with self._lock:
            self._counts.faults[fault.kind] += 1
            self._breaker.fail(self._clock.now(), fault.kind)
            if job is None:
                self._end_probe()
            else:
                waiters = self._flights.land(job, (), Outcome.FAULT)
        _tell(waiters)

    def _serve(self, job: Job) -> None:
        while True:
            with self._lock:
                blocks, left_s, end = self._next_batch(job)
                waiters = [] if end is None else self._flights.land(job, (), end)
            _tell(waiters)
            if end is not None:
                return
            got = self._reader.get(blocks, left_s)
            with self._lock:
                self._learn(job, got, left_s)
                waiters = self._flights.land(job, got.payloads, got.end)
            if got.end is Outcome.MISSED:
                self._hooks.missed(job.blocks[job.num_landed :])
            _tell(waiters)
            if got.end is not None or job.num_landed == len(job.blocks):
                return

    def _next_batch(self, job: Job) -> tuple[Sequence[KvBlock], float, Outcome | None]:
        now = self._clock.now()
        left_s = self._flights.time_left_s(job, now) - _GRACE * self._gate.settings.patience_s
        if not self._breaker.is_closed:
            return (), 0.0, Outcome.FAULT
        if left_s <= 0:  # also where nobody waits any more
            return (), 0.0, Outcome.LATE
        size = self._gate.batch_blocks(self._settings.block_bytes)
        job.asked_s = now
        return job.blocks[job.num_landed : job.num_landed + size], left_s, None

    def _learn(self, job: Job, got: Got, timeout_s: float) -> None:
        """Account for one call: counts, gate, breaker."""
        is_news = job.asked_s is not None  # else its silence was held against the store already
        job.asked_s = None
        self._count(got)
        num_asked, num_got = len(got.blocks), len(got.payloads)
        if got.fault is None:
            self._breaker.succeed()
            self._gate.observe_fetch(num_asked, num_got, got.num_bytes, got.seconds)
        elif got.fault.kind is not FaultKind.TIMEOUT:
            self._breaker.fail(self._clock.now(), got.fault.kind)
        elif is_news and self._is_fair(timeout_s):
            self._blame(num_asked, got.num_bytes, got.seconds)
        if not self._gate.judge(self._ask(job.blocks)).fetch:
            self._plan_probe(job.blocks, self._clock.now())  # the next one will be refused
        if not self._breaker.is_closed:
            self._tick.notify()  # a probe will be due

    def _count(self, got: Got) -> None:
        counts = self._counts
        counts.num_asked += len(got.blocks)
        counts.num_got += len(got.payloads)
        counts.num_bytes += got.num_bytes
        counts.seconds += got.seconds
        if got.fault is not None:
            counts.faults[got.fault.kind] += 1

    def _is_fair(self, seconds: float) -> bool:
        """Whether the store had time enough for its silence to mean something."""
        return seconds >= 0.5 * self._gate.settings.patience_s

    def _blame(self, num_asked: int, num_bytes: int, seconds: float) -> None:
        """The store did not answer in time, or not with everything: the wait was in vain."""
        self._breaker.fail(self._clock.now(), FaultKind.TIMEOUT)
        self._gate.observe_cut(num_asked * self._settings.block_bytes, num_bytes, seconds)

    def _keep_time(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                now = self._clock.now()
                waiters, jobs = self._flights.overdue(now)
                for job in jobs:
                    if job.asked_s is not None and self._is_fair(now - job.asked_s):
                        self._blame(1, 0, now - job.asked_s)
                        job.asked_s = None
                if self._probes.begin(now):
                    self._queue.appendleft(None)
                    self._work.notify()
                if not waiters:
                    self._tick.wait(self._pause_s(now))
            _tell(waiters)

    def _pause_s(self, now: float) -> float | None:
        due = [due_s for due_s in (self._flights.next_deadline_s, self._probes.due_s) if due_s is not None]
        return max(min(due) - now, 0.0) if due else None

    def _probe(self) -> None:
        """Measure the store for its own sake: a round trip, then a few blocks that were wanted of it.

        Small answers alone prove little: there are stores, and networks, that only fail large ones.
        """
        try:
            rtt_s = self._store.ping(_PROBE_TIMEOUT_S)
        except StoreFault as fault:
            self._hooks.failed(fault)
            with self._lock:
                self._counts.faults[fault.kind] += 1
                self._breaker.fail(self._clock.now(), fault.kind)
                self._end_probe()
            return
        with self._lock:
            self._gate.observe_ping(rtt_s)
            blocks = self._probes.blocks
            if not blocks:
                self._breaker.succeed()
                self._end_probe()
                return
        got = self._reader.get(blocks, _PROBE_TIMEOUT_S)
        with self._lock:
            self._learn_probe(got)
            self._end_probe()

    def _learn_probe(self, got: Got) -> None:
        self._count(got)
        if got.fault is None:
            self._breaker.succeed()
            if got.payloads:
                self._gate.observe_bytes(got.num_bytes, got.seconds)
        else:
            self._breaker.fail(self._clock.now(), got.fault.kind)

    def _end_probe(self) -> None:
        self._probes.end(self._clock.now())
        self._tick.notify()


def _tell(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        waiter.done(waiter)
