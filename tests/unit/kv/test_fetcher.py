"""The fetcher over a store that does as it is told: in time, once, proven, bounded."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from antiphon.core.clock import WallClock
from antiphon.core.kvblock import KvBlock
from antiphon.kv.breaker import Breaker, BreakerSettings
from antiphon.kv.codec import BadValueReason
from antiphon.kv.fetcher import Fetcher, FetcherParts, FetchSettings
from antiphon.kv.flights import Outcome, Waiter
from antiphon.kv.gate import Gate, GateSettings, Rates
from antiphon.kv.hosttier import Payload
from antiphon.kv.store import FaultKind, Run, StoreFault
from support.kvchains import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CODEC,
    PATIENCE_S,
    PuppetStore,
    chain,
    payload_of,
    until,
)

SETTINGS = FetchSettings(BLOCK_TOKENS, BLOCK_BYTES, num_threads=1)
RATES = Rates(prefill_tokens_per_s=100.0)


class Bench:
    """A fetcher, its store and everything it said."""

    def __init__(self, settings: FetchSettings = SETTINGS, *, patience_s: float = 1.0) -> None:
        self.store = PuppetStore()
        self.breaker = Breaker(BreakerSettings(min_retry_s=0.02, max_retry_s=0.05), random.Random(1).random)
        self.gate = Gate(GateSettings(patience_s=patience_s), RATES)
        self.news = threading.Condition()
        self.done: list[Waiter] = []
        self.landed_blocks: list[tuple[KvBlock, Payload]] = []
        self.missed_blocks: list[KvBlock] = []
        self.spoiled_blocks: list[tuple[KvBlock, BadValueReason]] = []
        self.faults: list[FaultKind] = []
        parts = FetcherParts(self.store, CODEC, self.gate, self.breaker, WallClock(), threading.Lock())
        self.fetcher = Fetcher(parts, self, settings)
        self.store.await_that(lambda: self.store.num_pings == 1)  # the first probe

    def landed(self, blocks: Sequence[tuple[KvBlock, Payload]]) -> None:
        self.landed_blocks += blocks

    def missed(self, blocks: Sequence[KvBlock]) -> None:
        self.missed_blocks += blocks

    def spoiled(self, block: KvBlock, reason: BadValueReason) -> None:
        self.spoiled_blocks.append((block, reason))

    def failed(self, fault: StoreFault) -> None:
        self.faults.append(fault.kind)

    def fill(self, blocks: Sequence[KvBlock]) -> None:
        for block in blocks:
            self.store.inner.put(CODEC.key(block), CODEC.encode(block, payload_of(block)), 10**6, 1.0)

    def start(self, blocks: Sequence[KvBlock], name: str = "g") -> str | None:
        return self.fetcher.start(name, blocks, self._take)

    def _take(self, waiter: Waiter) -> None:
        with self.news:
            self.done.append(waiter)
            self.news.notify_all()

    def wait(self, num: int = 1) -> list[Waiter]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.done) >= num, PATIENCE_S)
            return self.done[:num]

    def fetch(self, blocks: Sequence[KvBlock]) -> Waiter:
        """Start, and wait for the end."""
        num = len(self.done)
        assert self.start(blocks) is None
        return self.wait(num + 1)[num]

    def await_closed(self) -> None:
        """Until the breaker lets requests through again."""
        until(lambda: self.breaker.is_closed)

    def close(self) -> None:
        self.store.close()
        self.fetcher.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_what_is_there_comes_proven_and_in_order(bench: Bench) -> None:
    """The payloads of exactly these blocks; the hooks hear of what landed and of what did not."""
    blocks = chain(5)
    bench.fill(blocks[:3])
    waiter = bench.fetch(blocks)
    assert [(block, bytes(payload)) for block, payload in waiter.ready] == [
        (block, payload_of(block)) for block in blocks[:3]
    ]
    assert waiter.outcome is Outcome.FETCHED
    assert bench.landed_blocks == waiter.ready
    assert bench.missed_blocks == blocks[3:]
    counts = bench.fetcher.counts()
    assert (counts.num_asked, counts.num_got, counts.num_bytes) == (5, 3, 3 * BLOCK_BYTES)


def test_nothing_behind_a_hole_is_used(bench: Bench) -> None:
    """A block in the middle is missing: what follows it is worthless."""
    blocks = chain(5)
    bench.fill(blocks[:2] + blocks[3:])
    assert bench.fetch(blocks).num_ready == 2


@pytest.mark.parametrize("spoil", ["flip", "swap", "cut", "empty"])
def test_a_bad_value_is_a_miss_and_is_reported(bench: Bench, spoil: str) -> None:
    """Whatever lies under the key: it ends the run, and the hook hears of it so that it is deleted."""
    blocks = chain(3)
    bench.fill([blocks[0], blocks[2]])
    good = CODEC.encode(blocks[1], payload_of(blocks[1]))
    bad = {
        "flip": good[:-40] + bytes([good[-40] ^ 1]) + good[-39:],
        "swap": CODEC.encode(blocks[2], payload_of(blocks[2])),
        "cut": good[:-1],
        "empty": b"",
    }[spoil]
    bench.store.inner.put(CODEC.key(blocks[1]), bad, 10**6, 1.0)
    waiter = bench.fetch(blocks)
    assert waiter.num_ready == 1
    ((block, reason),) = bench.spoiled_blocks
    assert block == blocks[1]
    expected = {"flip": BadValueReason.MAC, "swap": BadValueReason.HASH}
    assert reason is expected.get(spoil, BadValueReason.LENGTH)
    assert bench.breaker.is_closed


def test_a_store_that_hangs_costs_the_patience_and_no_more() -> None:
    """The timekeeper tells the waiter, though the fetch thread is stuck; what comes later is not told."""
    bench = Bench(patience_s=0.02)
    blocks = chain(3)
    bench.fill(blocks)
    bench.store.hold()
    waiter = bench.fetch(blocks)
    assert (waiter.num_ready, waiter.outcome) == (0, Outcome.LATE)
    bench.store.let_go()
    bench.close()
    assert bench.done == [waiter]


def test_a_silent_store_opens_the_breaker_and_then_costs_nothing() -> None:
    """Three waits at most, whoever notices the silence; then requests are refused at once."""
    bench = Bench(replace(SETTINGS, num_threads=4), patience_s=0.02)
    bench.store.hold()
    refusals = []
    for number in range(5):
        refusal = bench.start(chain(2, start=1000 * number))
        if refusal is not None:
            refusals.append(refusal)
        else:
            bench.wait(number + 1 - len(refusals))
    assert len(bench.done) <= 3
    assert set(refusals) <= {"open_breaker", "slower"}
    bench.close()


def test_a_store_that_stops_in_the_middle_opens_the_breaker_too() -> None:
    """Small answers work, large ones end in silence: as bad for a request as no answer, and probes see it."""
    bench = Bench(patience_s=0.02)
    blocks = chain(8)
    bench.fill(blocks)
    get_run = bench.store.inner.get_run

    def cut(keys: Sequence[str], timeout_s: float) -> Run:
        run = get_run(keys[:2], timeout_s)
        return Run([*run.values, *[None] * (len(keys) - 2)], 0.02, StoreFault(FaultKind.TIMEOUT, "silence"))

    bench.store.inner.get_run = cut  # type: ignore[method-assign] # the store cuts its answers
    for number in range(3):
        waiter = bench.fetch(blocks)
        assert (waiter.num_ready, waiter.outcome) == (2, Outcome.LATE)
        assert bench.breaker.num_opened == (number == 2)
    num_runs = len(bench.store.runs)
    bench.store.await_that(lambda: len(bench.store.runs) >= num_runs + 3)  # probes
    assert bench.start(blocks) == "open_breaker"
    bench.store.inner.get_run = get_run  # type: ignore[method-assign]
    bench.await_closed()
    bench.close()


def test_an_opened_breaker_releases_who_waits_in_the_queue() -> None:
    """Their runs are not begun: nobody waits for a store that just refused."""
    bench = Bench(patience_s=PATIENCE_S)
    bench.store.hold()
    assert bench.start(chain(2), "asked") is None
    bench.store.await_that(lambda: len(bench.store.runs) == 1)
    assert bench.start(chain(2, start=1000), "queued") is None
    bench.store.fault = FaultKind.DENIED
    bench.store.let_go()
    assert [waiter.outcome for waiter in bench.wait(2)] == [Outcome.FAULT] * 2
    assert [CODEC.key(block) for block in chain(2, start=1000)] not in bench.store.runs
    bench.close()


def test_a_healed_store_is_noticed_without_requests() -> None:
    """The probe closes the breaker; no request had to try, and no deadline had to pass."""
    bench = Bench(patience_s=10 * PATIENCE_S)
    bench.store.fault = FaultKind.UNREACHABLE
    for number in range(3):
        bench.store.hold()  # so that the timekeeper has gone to sleep when the call fails
        assert bench.start(chain(2, start=1000 * number)) is None
        bench.store.await_that(lambda: len(bench.store.runs) > number)  # noqa: B023 - called in this turn
        bench.store.let_go()
        assert bench.wait(number + 1)[number].outcome is Outcome.FAULT
    assert bench.faults[:3] == [FaultKind.UNREACHABLE] * 3
    num_pings = bench.store.num_pings
    bench.store.await_that(lambda: bench.store.num_pings >= num_pings + 2)
    assert not bench.breaker.is_closed
    bench.store.fault = None
    bench.await_closed()
    bench.fill(chain(2))
    assert bench.fetch(chain(2)).num_ready == 2
    bench.close()


def test_a_fetch_that_closes_the_gate_has_the_store_measured(bench: Bench) -> None:
    """Before anybody is refused: a machine that was busy for a moment is not believed slow for long."""
    blocks = chain(2)
    bench.fill(blocks)
    bench.store.hold()
    assert bench.start(blocks) is None
    bench.store.await_that(lambda: bool(bench.store.runs))
    bench.gate.rates = replace(RATES, byte_s=100.0)  # so slow that one good sample does not help
    bench.store.let_go()
    bench.wait()
    until(lambda: bench.fetcher.counts().num_probes > 1)
    until(lambda: bench.start(blocks, "again") is None)


def test_a_gate_that_closed_opens_when_the_store_is_fast_again(bench: Bench) -> None:
    """Refused requests are measured off their path until they pay again."""
    blocks = chain(2)
    bench.fill(blocks)
    bench.gate.rates = replace(RATES, byte_s=1e-4)
    assert bench.start(blocks) == "slower"
    until(lambda: bench.start(blocks, "again") is None)
    (waiter,) = bench.wait()
    assert waiter.num_ready == 2


def test_equal_prompts_are_fetched_once(bench: Bench) -> None:
    """The store is asked once; everybody gets the bytes."""
    blocks = chain(4)
    bench.fill(blocks)
    bench.store.hold()
    for number in range(5):
        assert bench.start(blocks, f"g{number}") is None
    bench.store.await_that(lambda: len(bench.store.runs) == 1)
    bench.store.let_go()
    waiters = bench.wait(5)
    assert {waiter.num_ready for waiter in waiters} == {4}
    assert bench.store.runs == [[CODEC.key(block) for block in blocks]]


def test_a_cancelled_wait_is_not_told(bench: Bench) -> None:
    """And what was fetched for it alone is not asked for any more."""
    bench.store.hold()
    assert bench.start(chain(2), "running") is None
    bench.store.await_that(lambda: len(bench.store.runs) == 1)
    assert bench.start(chain(2, start=1000), "queued") is None
    bench.fetcher.cancel("running")
    bench.fetcher.cancel("queued")
    bench.store.let_go()
    blocks = chain(2, start=2000)
    bench.fill(blocks)
    waiter = bench.fetch(blocks)
    assert bench.done == [waiter]
    assert len(bench.store.runs) == 2
    assert bench.fetcher.num_bytes_under_way == 0


def test_bytes_under_way_are_bounded() -> None:
    """A run is cut to what fits; where nothing fits it is not begun, and says so."""
    bench = Bench(replace(SETTINGS, most_bytes=4 * BLOCK_BYTES))
    bench.store.hold()
    bench.fill(chain(9))
    assert bench.start(chain(9), "long") is None
    assert bench.fetcher.num_bytes_under_way == 4 * BLOCK_BYTES
    assert bench.start(chain(2, start=1000), "more") == "busy"
    assert bench.start(chain(4), "same") is None
    bench.store.let_go()
    assert {waiter.num_ready for waiter in bench.wait(2)} == {4}
    bench.close()


def test_waiters_are_bounded() -> None:
    """As many as allowed, and the next one computes."""
    bench = Bench(replace(SETTINGS, most_waiters=2))
    bench.store.hold()
    decisions = [bench.start(chain(1), f"g{number}") for number in range(3)]
    assert decisions == [None, None, "busy"]
    bench.close()


def test_long_runs_are_fetched_in_batches(bench: Bench) -> None:
    """Each as large as a part of the patience allows, one after the other, until the first miss."""
    bench.gate.rates = replace(RATES, byte_s=0.14 / BLOCK_BYTES)
    bench.gate.settings = replace(bench.gate.settings, safety=1.0)
    blocks = chain(6)
    bench.fill(blocks[:3])
    with bench.fetcher._lock:
        bench.gate.rates = replace(bench.gate.rates, prefill_tokens_per_s=1.0)
    waiter = bench.fetch(blocks)
    assert waiter.num_ready == 3
    assert len(bench.store.runs[0]) == 2


def test_what_came_in_time_is_used(bench: Bench) -> None:
    """The store falls silent after the first batch: its blocks are delivered at the deadline."""
    blocks = chain(6)
    bench.fill(blocks)
    bench.gate.settings = replace(bench.gate.settings, patience_s=0.02, most_batch_bytes=2 * BLOCK_BYTES)
    bench.gate.rates = replace(RATES, prefill_tokens_per_s=10_000.0)
    get_run, silence = bench.store.inner.get_run, threading.Event()

    def first_only(keys: Sequence[str], timeout_s: float) -> object:
        if len(bench.store.runs) > 1:
            silence.wait(PATIENCE_S)
        return get_run(keys, timeout_s)

    bench.store.inner.get_run = first_only  # type: ignore[method-assign,assignment] # the store falls silent
    waiter = bench.fetch(blocks)
    silence.set()
    assert (waiter.num_ready, waiter.outcome) == (2, Outcome.LATE)


def test_closing_tells_everybody() -> None:
    """Who waits is told that nothing comes; who comes later is refused."""
    bench = Bench()
    bench.store.hold()
    assert bench.start(chain(2), "one") is None
    assert bench.start(chain(2, start=1000), "two") is None
    bench.close()
    assert {waiter.outcome for waiter in bench.done} == {Outcome.FAULT}
    assert len(bench.done) == 2
    assert bench.start(chain(1)) == "no_store"


def test_a_bug_costs_a_fetch_and_not_the_thread(bench: Bench) -> None:
    """A store that raises what it must not is a failed store: told, rested, used again later."""
    blocks = chain(4)
    bench.fill(blocks)
    bench.store.bug = RuntimeError("not the protocol")
    for _ in range(8):
        if not bench.breaker.is_closed:
            break
        assert bench.fetch(blocks).outcome is Outcome.FAULT
    assert not bench.breaker.is_closed
    assert set(bench.faults) == {FaultKind.OTHER}
    assert bench.fetcher.num_bytes_under_way == 0
    bench.store.bug = None
    bench.await_closed()
    assert bench.fetch(blocks).outcome is Outcome.FETCHED
