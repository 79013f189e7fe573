"""The metrics of a gateway's queue. Rules as in metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_WAIT_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


class AdmissionMetrics:
    """Who waits, for how long, and who is turned away. Classes: interactive, default, batch."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Gauge(
            "antiphon_queue_requests",
            "Requests that wait for a place.",
            ["model", "class"],
            registry=registry,
        )
        self.tokens = Gauge(
            "antiphon_queue_tokens_waiting",
            "Tokens of these: prompts to be computed and answers, as expected.",
            ["model", "class"],
            registry=registry,
        )
        self.wait_s = Histogram(
            "antiphon_queue_wait_seconds",
            "From the request's coming to its start; 0 where a place was free.",
            ["class"],
            buckets=_WAIT_S,
            registry=registry,
        )
        self.rejected = Counter(
            "antiphon_queue_rejections",
            "Requests that were not started: rejected-queue-full, rejected-displaced (by a lighter tenant or "
            "a class below its share), rejected-wait-too-long, rejected-expired, rejected-stopping (the "
            "gateway ends); client-left; no-replica (nobody was left to serve them).",
            ["model", "reason", "class"],
            registry=registry,
        )
