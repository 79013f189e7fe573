"""The metrics of a gateway's books. Rules as in metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class UsageMetrics:
    """What became of rows of usage, and what requests cost."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge(
            "antiphon_usage_rows_open", "Requests of this gateway whose row has not ended.", registry=registry
        )
        self.waiting = Gauge(
            "antiphon_usage_writes_waiting",
            "Openings and ends of rows that wait to be written into the database.",
            registry=registry,
        )
        self.closed = Counter(
            "antiphon_usage_rows_closed",
            "Rows that this gateway ended: ok, client_gone, failed.",
            ["outcome"],
            registry=registry,
        )
        self.dropped = Counter(
            "antiphon_usage_rows_dropped",
            "Openings and ends of rows that were never written: the database was away for too long.",
            registry=registry,
        )
        self.swept = Counter(
            "antiphon_usage_rows_swept",
            "Rows of gateways that were killed, ended by this one as lost.",
            registry=registry,
        )
        self.write_failures = Counter(
            "antiphon_usage_write_failures",
            "Writes that the database did not take; they are repeated.",
            registry=registry,
        )
        self.cost = Counter(
            "antiphon_cost",
            "What answered requests cost by the catalogue's prices, in units of the currency.",
            ["model", "currency"],
            registry=registry,
        )
