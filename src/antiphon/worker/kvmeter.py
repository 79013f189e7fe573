"""Turns the KV tiers' totals into the worker's metrics, whenever the page is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client import Counter

from antiphon.kv.breaker import BreakerState
from antiphon.kv.gate import Rates
from antiphon.kv.stats import KvStats, StoreStats
from antiphon.obs.kvmetrics import KvMetrics

K = TypeVar("K", bound=str)


class KvMeter:
    """Remembers the totals it has seen, so that only what is new is added."""

    def __init__(self, metrics: KvMetrics) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[Counter, tuple[str, ...]], float] = {}

    def take(self, stats: KvStats) -> None:
        """Account for what happened since the last call."""
        prompts, host = self._metrics.prompts, self._metrics.host
        for source, count in (
            ("engine", stats.num_local),
            ("host", stats.num_host),
            ("store", stats.num_store),
            ("computed", stats.num_computed),
        ):
            self._add(prompts.blocks_wanted, count, source)
        self._add_all(prompts.decisions, stats.decisions)
        self._add(prompts.saved_s, stats.saved_s)
        self._add(self._metrics.store.fetched_bytes, stats.store_hit_bytes)
        self._add(host.evicted, stats.host_evicted)
        host.num_bytes.set(stats.host_bytes)
        host.num_blocks.set(stats.host_blocks)
        if stats.store is not None:
            self._take_store(stats.store)
            self._take_rates(stats.store.rates)

    def _take_store(self, store: StoreStats) -> None:
        metrics = self._metrics.store
        self._add(metrics.fetch_s, store.get_s)
        self._add_all(metrics.bad_values, store.bad_values)
        self._add_all(metrics.faults, store.read_faults, "read")
        self._add_all(metrics.faults, store.write_faults, "write")
        for outcome, count in (
            ("stored", store.num_stored),
            ("existing", store.num_existing),
            ("dropped", store.num_dropped),
        ):
            self._add(metrics.writes, count, outcome)
        self._add(metrics.written_bytes, store.stored_bytes)
        self._add(metrics.breakers_opened, store.num_opened)
        for operation, state in (("read", store.read_breaker), ("write", store.write_breaker)):
            metrics.breaker_open.labels(operation).set(state is not BreakerState.CLOSED)
        for operation, num_bytes in (("read", store.fetching_bytes), ("write", store.queued_bytes)):
            metrics.queued_bytes.labels(operation).set(num_bytes)

    def _take_rates(self, rates: Rates) -> None:
        metrics = self._metrics.rates
        metrics.store_rtt_s.set(rates.rtt_s)
        metrics.store_bytes_per_s.set(1 / rates.byte_s)
        metrics.import_bytes_per_s.set(1 / rates.import_byte_s)
        metrics.prefill_tokens_per_s.set(rates.prefill_tokens_per_s)

    def _add_all(self, counter: Counter, totals: Mapping[K, int], *labels: str) -> None:
        for name, total in totals.items():
            self._add(counter, total, *labels, str(name))

    def _add(self, counter: Counter, total: float, *labels: str) -> None:
        """A total may also fall (what was saved is an estimate): the counter waits until it is passed."""
        key = (counter, labels)
        new = total - self._seen.get(key, 0.0)
        if new > 0:
            (counter.labels(*labels) if labels else counter).inc(new)
            self._seen[key] = total
