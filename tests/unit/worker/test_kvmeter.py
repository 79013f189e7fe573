"""worker.kvmeter: totals of the tiers become counters that only grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from antiphon.kv.breaker import BreakerState
from antiphon.kv.codec import BadValueReason
from antiphon.kv.gate import Rates
from antiphon.kv.stats import KvStats, StoreStats
from antiphon.kv.store import FaultKind
from antiphon.obs.kvmetrics import KvMetrics
from antiphon.worker.kvmeter import KvMeter

STORE = StoreStats(
    num_asked=9,
    num_got=7,
    got_bytes=700,
    get_s=0.5,
    num_probes=1,
    read_faults={FaultKind.TIMEOUT: 2},
    bad_values={BadValueReason.MAC: 3},
    num_stored=4,
    num_existing=5,
    num_dropped=6,
    num_touched=0,
    num_deleted=3,
    stored_bytes=400,
    write_faults={FaultKind.OUT_OF_MEMORY: 1},
    read_breaker=BreakerState.OPEN,
    write_breaker=BreakerState.CLOSED,
    num_opened=1,
    queued_bytes=11,
    fetching_bytes=12,
    rates=Rates(rtt_s=0.001, byte_s=1e-9, import_byte_s=5e-9, prefill_tokens_per_s=400.0),
)
STATS = KvStats(
    num_lookups=3,
    num_local=10,
    num_host=20,
    num_store=30,
    num_computed=40,
    host_hit_bytes=200,
    store_hit_bytes=300,
    saved_s=1.5,
    decisions={"fetched": 2, "slower": 1},
    host_blocks=8,
    host_bytes=800,
    host_evicted=2,
    store=STORE,
)


def page(*pictures: KvStats) -> dict[str, float]:
    """The samples after these pictures, by name and labels."""
    registry = CollectorRegistry()
    meter = KvMeter(KvMetrics(registry))
    for picture in pictures:
        meter.take(picture)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_every_total_finds_its_counter() -> None:
    """One picture: each figure stands under its name and label."""
    samples = page(STATS)
    expected = {
        "antiphon_kv_prompt_blocks_total engine": 10,
        "antiphon_kv_prompt_blocks_total host": 20,
        "antiphon_kv_prompt_blocks_total store": 30,
        "antiphon_kv_prompt_blocks_total computed": 40,
        "antiphon_kv_decisions_total fetched": 2,
        "antiphon_kv_decisions_total slower": 1,
        "antiphon_kv_saved_seconds_total": 1.5,
        "antiphon_kv_fetched_bytes_total": 300,
        "antiphon_kv_bad_values_total mac": 3,
        "antiphon_kv_store_faults_total read timeout": 2,
        "antiphon_kv_store_faults_total write out_of_memory": 1,
        "antiphon_kv_writes_total stored": 4,
        "antiphon_kv_writes_total existing": 5,
        "antiphon_kv_writes_total dropped": 6,
        "antiphon_kv_breaker_open read": 1,
        "antiphon_kv_breaker_open write": 0,
        "antiphon_kv_queued_bytes read": 12,
        "antiphon_kv_queued_bytes write": 11,
        "antiphon_kv_store_rtt_seconds": 0.001,
        "antiphon_kv_store_bytes_per_second": 1e9,
        "antiphon_kv_import_bytes_per_second": 2e8,
        "antiphon_kv_prefill_tokens_per_second": 400,
    }
    assert {name: samples[name] for name in expected} == pytest.approx(expected)


def test_the_same_picture_twice_counts_once() -> None:
    """Scraping often changes nothing."""
    assert page(STATS, STATS, STATS)["antiphon_kv_writes_total stored"] == 4


def test_growth_is_added_and_a_shrinking_estimate_waits() -> None:
    """Counters never fall, and catch up exactly."""
    samples = page(
        STATS, replace(STATS, saved_s=1.0, num_store=31), replace(STATS, saved_s=2.0, num_store=33)
    )
    assert samples["antiphon_kv_saved_seconds_total"] == 2.0
    assert samples["antiphon_kv_prompt_blocks_total store"] == 33


def test_without_a_store_the_host_tier_is_shown() -> None:
    """A worker without Redis still has a host tier."""
    samples = page(replace(STATS, store=None))
    assert samples["antiphon_kv_host_bytes"] == 800
    assert not any(name.startswith("antiphon_kv_writes_total ") for name in samples)
