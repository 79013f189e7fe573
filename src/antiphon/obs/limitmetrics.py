"""The metrics of a gateway's limits. Rules as in metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_RTT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)


class LimitMetrics:
    """Who is over a limit, and whether gateways count together."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refusals = Counter(
            "antiphon_limit_refusals",
            "Requests that were refused because of a limit of their key or client token.",
            ["limit"],
            registry=registry,
        )
        self.is_alone = Gauge(
            "antiphon_limits_alone",
            "1 while the control Redis does not answer and this gateway enforces its part of limits alone.",
            registry=registry,
        )
        self.gateways = Gauge(
            "antiphon_limits_gateways", "Gateways that share the limits, as last seen.", registry=registry
        )
        self.count_s = Histogram(
            "antiphon_limit_count_seconds",
            "To count a request in the control Redis, waiting included.",
            buckets=_RTT_S,
            registry=registry,
        )
