"""The KV tiers behind an engine: this process's memory, then the store all workers share.

`KvCache` is what a worker holds. `begin` looks a waiting prompt's blocks up, nearest tier first, and
delivers what can be had in time; `keep` takes blocks the engine filled. Invariants: no public method but
`drain` and `close` waits for anything (dictionary look-ups, appends, a notify); every `begin` is
answered exactly once unless cancelled; what is delivered is contiguous from `num_local` on and proven;
what cannot be had is computed, and nothing that goes wrong here is more than a count and a line.

Does not know the engine, and holds no KV that the budget of the host tier and the bounds of fetcher and
writer do not cover.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from antiphon.core.blockhash import BlockHash
from antiphon.core.clock import Clock
from antiphon.core.generation import KvReport
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from antiphon.kv.alarm import Alarm, Tell
from antiphon.kv.codec import BlockCodec
from antiphon.kv.events import Directory
from antiphon.kv.fetcher import FetchSettings
from antiphon.kv.flights import Waiter
from antiphon.kv.gate import Gate, GateSettings, Rates
from antiphon.kv.hosttier import HostSettings, HostTier, Payload
from antiphon.kv.remote import Remote, RemoteParts
from antiphon.kv.stats import KvStats
from antiphon.kv.store import BlockStore
from antiphon.kv.ttl import TtlPolicy
from antiphon.kv.writer import WriterSettings


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came for a generation: blocks from `Prefix.num_local` on, without a gap, and the account of it."""

    generation: str
    blocks: list[tuple[KvBlock, Payload, Tier]]
    report: KvReport


Deliver: TypeAlias = Callable[[Delivery], None]
"""Called on the thread that called `begin`, or on a kv thread. Must neither block nor raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSettings:
    """Sizes and policies of the tiers. `rates`: what is known before anything was measured."""

    block_tokens: int
    block_bytes: int  # of a payload
    host: HostSettings
    most_fetch_bytes: int = 512 * 2**20  # under way at a time; what does not fit is computed
    writer: WriterSettings = field(default_factory=WriterSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    ttl: TtlPolicy = field(default_factory=TtlPolicy)
    rates: Rates = field(default_factory=Rates)


@dataclass(slots=True)
class _Totals:
    num_lookups: int = 0
    num_local: int = 0
    num_host: int = 0
    num_store: int = 0
    num_computed: int = 0
    host_bytes: int = 0
    store_bytes: int = 0
    saved_s: float = 0.0
    decisions: Counter[str] = field(default_factory=Counter)


class KvCache:
    """Thread-safe."""

    def __init__(
        self,
        settings: KvCacheSettings,
        remote: tuple[BlockStore, BlockCodec] | None,
        clock: Clock,
        tell: Tell,
    ) -> None:
        """`remote`: the shared store and the codec of our namespace; None: the host tier alone."""
        self.directory = Directory()
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()  # of the gate, the fetcher's books and the totals
        self._gate = Gate(settings.gate, settings.rates)
        self._host = HostTier(settings.host, clock, self.directory)
        self._totals = _Totals()
        self._remote = None
        if remote is not None:
            alarm = Alarm(tell, clock)
            parts = RemoteParts(*remote, self._gate, self._lock, self._host, self.directory, alarm, clock)
            fetch = FetchSettings(
                settings.block_tokens, settings.block_bytes, most_bytes=settings.most_fetch_bytes
            )
            self._remote = Remote(parts, fetch, settings.writer, settings.ttl)

    def begin(self, prefix: Prefix, deliver: Deliver) -> None:
        """Look the blocks up that the engine lacks. `deliver` is called once: now, or from a kv thread."""
        beyond = prefix.blocks[prefix.num_local :]
        found = self._host.run(beyond)
        near = [(block, payload, Tier.HOST) for block, payload in zip(beyond, found, strict=False)]
        wanted = beyond[len(near) :]
        self._use(prefix.blocks[: prefix.num_local + len(near)])
        decision: str | None = "none" if not wanted else "no_store"
        if wanted and self._remote is not None:

            def done(waiter: Waiter) -> None:
                deliver(self._fetched(prefix, near, waiter))

            decision = self._remote.fetcher.start(prefix.generation, wanted, done)
        if decision is not None:
            deliver(self._delivery(prefix, near, 0.0, decision))

    def cancel(self, generation: str) -> None:
        """Drop what is still to be delivered to it. A delivery that is being made just now still comes."""
        if self._remote is not None:
            self._remote.fetcher.cancel(generation)

    def wants(self, block: KvBlock) -> bool:
        """Whether `keep` would add anything: ask before paying for an export."""
        num_bytes = self._settings.block_bytes
        if self._host.can_hold(num_bytes) and block.hash not in self._host:
            return True
        return self._remote is not None and self._remote.writer.wants(block, num_bytes)

    def keep(self, blocks: Sequence[tuple[KvBlock, Payload]]) -> None:
        """Take blocks that were computed into the host tier, and queue them for the store."""
        self._host.put(blocks)
        if self._remote is not None:
            self._remote.writer.offer(blocks)

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop what is held here of these tenants, each by what its scopes begin with."""
        self._host.forget(tenants)
        if self._remote is not None:
            self._remote.writer.drop(tenants)

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this when all that was kept is in the store, or that fails. It must not block or raise."""
        if self._remote is None:
            call()
        else:
            self._remote.writer.when_written(call)

    def take_lost(self) -> Collection[BlockHash]:
        """Blocks in use that the store turned out to have lost since the last call: `keep` may add them."""
        return () if self._remote is None else self._remote.take_lost()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Prompt tokens that were computed within so many seconds of the engine's time."""
        with self._lock:
            self._gate.observe_prefill(num_tokens, seconds)

    def observe_import(self, num_blocks: int, seconds: float) -> None:
        """Blocks that the engine took over and put into place in so many seconds."""
        with self._lock:
            self._gate.observe_import(num_blocks * self._settings.block_bytes, seconds)

    @property
    def rates(self) -> Rates:
        """What the cost gate goes by now."""
        return self._gate.rates

    @property
    def uses_store(self) -> bool:
        """Whether blocks are shared with other workers now: there is a store, and no breaker rests it."""
        return self._remote is not None and self._remote.is_in_use

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything kept is written, at most so long. Whether it is."""
        return self._remote is None or self._remote.writer.drain(timeout_s)

    def close(self) -> None:
        """Deliver to whoever still waits, end the threads, close the store. Unwritten blocks are lost."""
        if self._remote is not None:
            self._remote.close()

    def stats(self) -> KvStats:
        """A picture of now."""
        store = None if self._remote is None else self._remote.stats()
        with self._lock:
            totals = self._totals
            return KvStats(
                num_lookups=totals.num_lookups,
                num_local=totals.num_local,
                num_host=totals.num_host,
                num_store=totals.num_store,
                num_computed=totals.num_computed,
                host_hit_bytes=totals.host_bytes,
                store_hit_bytes=totals.store_bytes,
                saved_s=totals.saved_s,
                decisions=dict(totals.decisions),
                host_blocks=len(self._host),
                host_bytes=self._host.num_bytes,
                host_evicted=self._host.num_evicted,
                store=store,
            )

    def _use(self, blocks: Sequence[KvBlock]) -> None:
        """These serve a prompt: they stay, wherever else they lie."""
        self._host.touch(blocks)
        if self._remote is not None:
            self._remote.writer.touch(blocks)

    def _fetched(self, prefix: Prefix, near: list[tuple[KvBlock, Payload, Tier]], waiter: Waiter) -> Delivery:
        far = [(block, payload, Tier.STORE) for block, payload in waiter.ready]
        self._use([block for block, _, _ in far])
        return self._delivery(prefix, near + far, self._clock.now() - waiter.started_s, waiter.outcome.value)

    def _delivery(
        self, prefix: Prefix, blocks: list[tuple[KvBlock, Payload, Tier]], fetch_s: float, decision: str
    ) -> Delivery:
        host_bytes = sum(len(payload) for _, payload, tier in blocks if tier is Tier.HOST)
        store_bytes = sum(len(payload) for _, payload, tier in blocks if tier is Tier.STORE)
        num_store = sum(tier is Tier.STORE for _, _, tier in blocks)
        with self._lock:
            compute_s = self._gate.compute_s(len(blocks) * self._settings.block_tokens)
            report = KvReport(
                num_local=prefix.num_local,
                num_host=len(blocks) - num_store,
                num_store=num_store,
                num_computed=len(prefix.blocks) - prefix.num_local - len(blocks),
                fetched_bytes=store_bytes,
                fetch_s=fetch_s,
                saved_s=compute_s - fetch_s,
                decision=decision,
            )
            self._count(report, host_bytes)
        return Delivery(prefix.generation, blocks, report)

    def _count(self, report: KvReport, host_bytes: int) -> None:
        totals = self._totals
        totals.num_lookups += 1
        totals.num_local += report.num_local
        totals.num_host += report.num_host
        totals.num_store += report.num_store
        totals.num_computed += report.num_computed
        totals.host_bytes += host_bytes
        totals.store_bytes += report.fetched_bytes
        totals.saved_s += report.saved_s
        totals.decisions[report.decision] += 1
