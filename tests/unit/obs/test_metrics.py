"""Metrics: declared once a process, never shared, in Prometheus' form."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from antiphon.obs.metrics import GatewayMetrics, WorkerMetrics

BOTH = (GatewayMetrics, WorkerMetrics)


@pytest.mark.parametrize("kind", BOTH)
def test_names_carry_the_product(kind: type[GatewayMetrics] | type[WorkerMetrics]) -> None:
    """Each name begins with `antiphon_`, says its unit, and has help."""
    families = list(text_string_to_metric_families(kind().render().decode()))
    assert families
    for family in families:
        assert family.name.startswith("antiphon_")
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_sequences", "_tokens"))


@pytest.mark.parametrize("kind", BOTH)
def test_two_processes_in_one_share_nothing(kind: type[GatewayMetrics] | type[WorkerMetrics]) -> None:
    """Also nothing is left in the library's global registry."""
    before = len(list(REGISTRY.collect()))
    first, second = kind(), kind()
    first.generation_tokens.labels("m").inc() if kind is GatewayMetrics else first.generation_tokens.inc()
    assert first.render() != second.render()
    assert len(list(REGISTRY.collect())) == before


def test_what_was_counted_is_rendered() -> None:
    """Through the library's own parser."""
    metrics = WorkerMetrics()
    metrics.blocks.labels("free").set(7)
    metrics.step_s.observe(0.003)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    (free,) = families["antiphon_kv_blocks"].samples
    assert (free.labels, free.value) == ({"state": "free"}, 7.0)
    counts = [s for s in families["antiphon_step_seconds"].samples if s.name.endswith("_count")]
    assert counts[0].value == 1


def test_a_gateway_forgets_models_that_nobody_serves() -> None:
    """A gauge of a worker that is gone would be read as if it were there."""
    metrics = GatewayMetrics()
    metrics.scale.queue_tokens.labels("m", "both").set(5)
    assert b'antiphon_fleet_queue_tokens{model="m",role="both"} 5.0' in metrics.render()
    metrics.scale.clear()
    assert b'role="both"' not in metrics.render()
