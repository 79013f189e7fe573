"""What the KV cache did and how it stands, as one frozen picture for metrics and people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from antiphon.kv.breaker import BreakerState
from antiphon.kv.codec import BadValueReason
from antiphon.kv.gate import Rates
from antiphon.kv.store import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The shared store, as this worker sees it. Counts are totals since the start."""

    num_asked: int  # blocks
    num_got: int
    got_bytes: int
    get_s: float  # fetch threads' time in store and codec
    num_probes: int
    read_faults: Mapping[FaultKind, int]
    bad_values: Mapping[BadValueReason, int]
    num_stored: int
    num_existing: int
    num_dropped: int
    num_touched: int
    num_deleted: int
    stored_bytes: int
    write_faults: Mapping[FaultKind, int]
    read_breaker: BreakerState
    write_breaker: BreakerState
    num_opened: int  # both breakers
    queued_bytes: int  # to be written
    fetching_bytes: int
    rates: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStats:
    """One worker's tiers behind the engine. Counts are totals since the start, in blocks."""

    num_lookups: int  # generations
    num_local: int  # blocks of theirs that were in the engine
    num_host: int
    num_store: int
    num_computed: int
    host_hit_bytes: int
    store_hit_bytes: int
    saved_s: float  # estimated
    decisions: Mapping[str, int] = field(default_factory=dict)  # by `KvReport.decision`
    host_blocks: int = 0
    host_bytes: int = 0
    host_evicted: int = 0
    store: StoreStats | None = None
