"""Every metric, declared once.

A process builds one of these classes with a registry of its own: nothing registers at import time,
and two gateways in one test process do not share counters. Names follow vLLM's where it has one.
Label values come from closed sets (routes, configured models, statuses, worker names, finish
reasons): text of a client never becomes a label.
"""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from antiphon.obs.admissionmetrics import AdmissionMetrics
from antiphon.obs.kvmetrics import KvMetrics
from antiphon.obs.limitmetrics import LimitMetrics
from antiphon.obs.usagemetrics import UsageMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_TIME_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 1.0, 2.5)
_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class GatewayMetrics:
    """What a gateway process counts."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "antiphon_http_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.answers = Counter(
            "antiphon_request_finished", "Choices by how they ended.", ["model", "finish"], registry=registry
        )
        self.ttft_s = Histogram(
            "antiphon_time_to_first_token_seconds",
            "Request accepted to first token written.",
            ["model"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.tpot_s = Histogram(
            "antiphon_time_per_output_token_seconds",
            "Mean gap between the tokens of one answer.",
            ["model"],
            buckets=_TOKEN_TIME_S,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "antiphon_e2e_request_latency_seconds",
            "Request accepted to last byte written.",
            ["model"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "antiphon_prompt_tokens", "Prompt tokens taken in.", ["model"], registry=registry
        )
        self.cached_tokens = Counter(
            "antiphon_cached_prompt_tokens",
            "Prompt tokens whose KV was not computed anew.",
            ["model"],
            registry=registry,
        )
        self.generation_tokens = Counter(
            "antiphon_generation_tokens", "Answer tokens given out.", ["model"], registry=registry
        )
        self.open_answers = Gauge("antiphon_open_answers", "Answers now being made.", registry=registry)
        self.worker_up = Gauge(
            "antiphon_worker_up", "1 where the worker's link is up.", ["worker"], registry=registry
        )
        self.fallbacks = Counter(
            "antiphon_route_fallbacks",
            "Requests that went on to the next model, by the one that did not answer.",
            ["model"],
            registry=registry,
        )
        self.tls_end = Gauge(
            "antiphon_tls_certificate_expiry_seconds",
            "Unix time at which the certificate that is shown ends; NaN without TLS.",
            registry=registry,
        )
        self.tls_end.set(math.nan)
        self.upstreams = UpstreamMetrics(registry)
        self.registry = RegistryMetrics(registry)

        self.failover = FailoverMetrics(registry)
        self.scale = FleetMetrics(registry)
        self.admission = AdmissionMetrics(registry)
        self.limits = LimitMetrics(registry)
        self.directory = DirectoryMetrics(registry)
        self.usage = UsageMetrics(registry)

    def render(self) -> bytes:
        """The Prometheus text form of all of them."""
        return generate_latest(self._registry)


class RegistryMetrics:
    """How a gateway finds its workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reads = Counter(
            "antiphon_registry_reads",
            "Attempts to read the workers' leases in the control Redis, by outcome: done, failed.",
            ["outcome"],
            registry=registry,
        )
        self.age_s = Gauge(
            "antiphon_registry_age_seconds",
            "Since the last read that was done (or since the start, where none was); 0 without a control "
            "Redis. Grows while it is away: workers known before go on serving.",
            registry=registry,
        )
        self.workers = Gauge(
            "antiphon_registry_workers", "Workers with a lease, at the last read done.", registry=registry
        )
        self.refused = Counter(
            "antiphon_leases_refused",
            "Leases that did not count: malformed, too_long, forged (not sealed with the workers' secret).",
            ["reason"],
            registry=registry,
        )


class ScaleMetrics:
    """What an autoscaler goes by, by model and role; docs/autoscaling.md says how. Set at each scrape."""

    def __init__(self, prefix: str, where: str, registry: CollectorRegistry) -> None:
        labels = ["model", "role"]
        self.queue_tokens = Gauge(
            f"{prefix}_queue_tokens",
            f"Prompt tokens still to be computed {where}.",
            labels,
            registry=registry,
        )
        self.running = Gauge(
            f"{prefix}_running_sequences", f"Sequences in the batch {where}.", labels, registry=registry
        )
        self.kv_pressure = Gauge(
            f"{prefix}_kv_pressure",
            f"Share of the KV blocks {where} that running sequences hold.",
            labels,
            registry=registry,
        )
        self.wait_s = Gauge(
            f"{prefix}_estimated_wait_seconds",
            f"What a request that came now would wait {where} before the first of its tokens is computed.",
            labels,
            registry=registry,
        )


class FleetMetrics(ScaleMetrics):
    """The same of all workers that a gateway is linked to, counted on with what it sent them since they
    reported, and of what waits here; the wait is that of the worker where it is shortest, and the one here.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("antiphon_fleet", "at this gateway and the workers that take work", registry)
        self.workers = Gauge(
            "antiphon_fleet_workers", "Workers that take work.", ["model", "role"], registry=registry
        )

    def clear(self) -> None:
        """Forget models and roles: those that are gone have no line."""
        for gauge in (self.queue_tokens, self.running, self.kv_pressure, self.wait_s, self.workers):
            gauge.clear()


class DirectoryMetrics:
    """What a gateway was told of the blocks that workers hold. Set at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks = Gauge(
            "antiphon_router_directory_blocks",
            "Blocks that the worker holds, as far as it told.",
            ["worker"],
            registry=registry,
        )
        self.age_s = Gauge(
            "antiphon_router_directory_age_seconds",
            "Since the worker last told of its blocks.",
            ["worker"],
            registry=registry,
        )
        self.silent = Gauge(
            "antiphon_router_directory_silent",
            "1 where the worker's cache grows and it tells of no block: it is routed to as if it held none.",
            ["worker"],
            registry=registry,
        )
        self.store_blocks = Gauge(
            "antiphon_router_directory_store_blocks",
            "Blocks that the store is believed to have.",
            registry=registry,
        )
        self.dropped_blocks = Counter(
            "antiphon_router_directory_dropped_blocks",
            "Blocks of workers that were forgotten for want of room.",
            registry=registry,
        )
        self.events = Counter(
            "antiphon_router_directory_events",
            "Messages: gap (some are missing before it), ignored (late, doubled, of another life); and "
            "resync (a snapshot was asked for).",
            ["event"],
            registry=registry,
        )

    def clear(self) -> None:
        """Forget workers: those that are gone have no line."""
        for gauge in (self.blocks, self.age_s, self.silent):
            gauge.clear()


class FailoverMetrics:
    """What a gateway did about workers that were lost, silent or failing, or too busy for a long prompt."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.moves = Counter(
            "antiphon_answer_moves",
            "Choices that went on at another worker: death, drain, stall, error, first_token, token, hedge, "
            "unsplit.",
            ["reason"],
            registry=registry,
        )
        self.refused_moves = Counter(
            "antiphon_retry_budget_refusals",
            "Answers that did not move because the retry budget was spent.",
            ["reason"],
            registry=registry,
        )
        self.ejections = Counter(
            "antiphon_worker_ejections", "Workers ejected because their answers fail.", registry=registry
        )
        self.stalls = Counter(
            "antiphon_worker_stalls", "Workers that were silent while others spoke.", registry=registry
        )
        self.quarantined = Counter(
            "antiphon_quarantined_requests",
            "Requests that killed workers (found), and later ones like them (refused).",
            ["outcome"],
            registry=registry,
        )
        self.splits = Counter(
            "antiphon_split_prompts",
            "Prompts computed for another worker to answer: computed, late, failed, dropped.",
            ["outcome"],
            registry=registry,
        )
        self.parked = Gauge(
            "antiphon_parked_choices", "Choices that wait for a worker to go on at.", registry=registry
        )


class UpstreamMetrics:
    """What a gateway sees of servers that answer for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "antiphon_upstream_requests",
            "Requests by outcome: ok, aborted (the client left), busy (429), refused (the client's mistake), "
            "denied (our key or the catalogue is wrong), fault, full (too many there), aside (not asked).",
            ["upstream", "outcome"],
            registry=registry,
        )
        self.ttft_s = Histogram(
            "antiphon_upstream_time_to_first_token_seconds",
            "Request sent to first token received.",
            ["upstream"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.in_flight = Gauge(
            "antiphon_upstream_requests_in_flight", "Requests there now.", ["upstream"], registry=registry
        )
        self.up = Gauge(
            "antiphon_upstream_up",
            "0 where it is put aside for its failures.",
            ["upstream"],
            registry=registry,
        )
        self.mirrored = Counter(
            "antiphon_mirrored_requests",
            "Copies sent to a mirror: ok, failed, dropped (too many at once).",
            ["model", "outcome"],
            registry=registry,
        )


class WorkerMetrics:
    """What a worker process counts. Written by the process's event loop from the engine's step figures."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.step_s = Histogram(
            "antiphon_step_seconds", "Time of one engine step.", buckets=_STEP_S, registry=registry
        )
        self.batch_sequences = Histogram(
            "antiphon_step_sequences", "Sequences in one step.", buckets=_POWERS, registry=registry
        )
        self.batch_tokens = Histogram(
            "antiphon_step_tokens", "Tokens computed in one step.", buckets=_POWERS, registry=registry
        )
        self.blocks = Gauge(
            "antiphon_kv_blocks", "KV blocks by state: free, cached, used.", ["state"], registry=registry
        )
        self.running = Gauge("antiphon_num_requests_running", "Sequences in the batch.", registry=registry)
        self.waiting = Gauge(
            "antiphon_num_requests_waiting", "Sequences that wait for admission.", registry=registry
        )
        self.preemptions = Counter(
            "antiphon_num_preemptions", "Sequences that lost their blocks.", registry=registry
        )
        self.step_faults = Counter("antiphon_step_faults", "Steps that failed.", registry=registry)
        self.prefix_queries = Counter(
            "antiphon_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", registry=registry
        )
        self.prefix_hits = Counter(
            "antiphon_prefix_cache_hits", "Prompt tokens found there.", registry=registry
        )
        self.prefill_tokens = Counter("antiphon_prefill_tokens", "Prompt tokens computed.", registry=registry)
        self.generation_tokens = Counter(
            "antiphon_generation_tokens", "Answer tokens computed.", registry=registry
        )
        self.open_links = Gauge("antiphon_open_links", "Gateways now connected.", registry=registry)
        self.lease_renewals = Counter(
            "antiphon_lease_renewals",
            "Renewals of this worker's lease in the control Redis, by outcome: done, failed.",
            ["outcome"],
            registry=registry,
        )
        self.kv = KvMetrics(registry)
        self.scale = ScaleMetrics("antiphon", "here", registry)

    def render(self) -> bytes:
        """The Prometheus text form of all of them."""
        return generate_latest(self._registry)
