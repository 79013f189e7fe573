"""The metrics of the KV tiers behind a worker's engine, by what they are about. Rules as in metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class KvMetrics:
    """All of them. Written when the worker's page is asked for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompts = KvPromptMetrics(registry)
        self.host = KvHostMetrics(registry)
        self.store = KvStoreMetrics(registry)
        self.rates = KvRateMetrics(registry)


class KvPromptMetrics:
    """Where the KV of prompts came from, and what that was worth."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks_wanted = Counter(
            "antiphon_kv_prompt_blocks",
            "Full blocks of prompts by where their KV came from: engine, host, store, or computed.",
            ["source"],
            registry=registry,
        )
        self.decisions = Counter(
            "antiphon_kv_decisions",
            "Prompts by what was decided about the store: none, fetched, missed, slower, busy, late, fault, "
            "open_breaker, no_store.",
            ["decision"],
            registry=registry,
        )
        self.saved_s = Counter(
            "antiphon_kv_saved_seconds",
            "Estimated: computing what was taken over, less fetching it.",
            registry=registry,
        )


class KvHostMetrics:
    """The memory of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_bytes = Gauge("antiphon_kv_host_bytes", "Payload in the host tier.", registry=registry)
        self.num_blocks = Gauge("antiphon_kv_host_blocks", "Blocks in the host tier.", registry=registry)
        self.evicted = Counter(
            "antiphon_kv_host_evictions",
            "Blocks that left the host tier for want of room.",
            registry=registry,
        )


class KvStoreMetrics:
    """The shared store, as this worker meets it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.fetched_bytes = Counter(
            "antiphon_kv_fetched_bytes", "Payload taken over from the store.", registry=registry
        )
        self.fetch_s = Counter(
            "antiphon_kv_fetch_seconds", "Fetch threads' time in store and codec.", registry=registry
        )
        self.bad_values = Counter(
            "antiphon_kv_bad_values",
            "Values refused, by the check that failed; deleted, but for key: signed with one unknown here.",
            ["reason"],
            registry=registry,
        )
        self.faults = Counter(
            "antiphon_kv_store_faults",
            "Calls of the store that failed.",
            ["operation", "kind"],
            registry=registry,
        )
        self.writes = Counter(
            "antiphon_kv_writes",
            "Blocks to be written: stored, existing (another worker was first), dropped (queue full or "
            "writes stopped).",
            ["outcome"],
            registry=registry,
        )
        self.written_bytes = Counter(
            "antiphon_kv_written_bytes", "Bytes stored, headers included.", registry=registry
        )
        self.breakers_opened = Counter(
            "antiphon_kv_breaker_opened", "Times a breaker opened.", registry=registry
        )
        self.breaker_open = Gauge(
            "antiphon_kv_breaker_open",
            "1 where the store is not used: open, or trying it again.",
            ["operation"],
            registry=registry,
        )
        self.queued_bytes = Gauge(
            "antiphon_kv_queued_bytes", "Bytes on their way.", ["operation"], registry=registry
        )


class KvRateMetrics:
    """What the cost gate goes by."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.store_rtt_s = Gauge(
            "antiphon_kv_store_rtt_seconds", "The gate's estimate of a round trip.", registry=registry
        )
        self.store_bytes_per_s = Gauge(
            "antiphon_kv_store_bytes_per_second", "The gate's estimate of the bandwidth.", registry=registry
        )
        self.prefill_tokens_per_s = Gauge(
            "antiphon_kv_prefill_tokens_per_second",
            "The gate's estimate of how fast prompts are computed.",
            registry=registry,
        )
        self.import_bytes_per_s = Gauge(
            "antiphon_kv_import_bytes_per_second",
            "The gate's estimate of how fast the engine puts blocks into place.",
            registry=registry,
        )
