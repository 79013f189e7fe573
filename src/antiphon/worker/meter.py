"""Turns the engine's counters into the worker's metrics, once per step, and its load at each scrape."""

from __future__ import annotations

import dataclasses

from antiphon.core.generation import Load, WorkerInfo
from antiphon.core.wait import wait_s
from antiphon.engine.counters import Counters
from antiphon.obs.metrics import ScaleMetrics, WorkerMetrics
from antiphon.worker.enginethread import StepNews


def measure(metrics: ScaleMetrics, info: WorkerInfo, load: Load) -> None:
    """Say how much is to do here, for autoscalers. Of a rate that is not known yet: no wait."""
    labels, rates = (info.model, info.role), load.rates
    token_s = 1 / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s > 0 else 0.0
    num_sequences = load.running + load.waiting
    waits_s = wait_s(
        load.waiting_tokens, num_sequences, info.max_sequences, token_s=token_s, step_s=rates.step_s
    )
    metrics.queue_tokens.labels(*labels).set(load.waiting_tokens)
    metrics.running.labels(*labels).set(load.running)
    metrics.kv_pressure.labels(*labels).set(load.used_blocks / info.num_blocks)
    metrics.wait_s.labels(*labels).set(waits_s)


class Meter:
    """Remembers the counters it has seen, so that only what is new is added."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._seen = Counters()

    def take(self, news: StepNews) -> None:
        """Account for what happened since the last call."""
        metrics, now, seen = self._metrics, news.counters, self._seen
        if now.steps > seen.steps:
            metrics.step_s.observe(news.step.seconds)
            metrics.batch_sequences.observe(news.step.num_sequences)
            metrics.batch_tokens.observe(news.step.num_tokens)
        hits = now.cached_tokens - seen.cached_tokens
        computed = now.prefill_tokens - seen.prefill_tokens
        metrics.prefill_tokens.inc(computed)
        metrics.prefix_hits.inc(hits)
        metrics.prefix_queries.inc(hits + computed)
        metrics.generation_tokens.inc(now.decode_tokens - seen.decode_tokens)
        metrics.preemptions.inc(now.preemptions - seen.preemptions)
        metrics.step_faults.inc(now.failed_steps - seen.failed_steps)
        self._seen = dataclasses.replace(now)
        load = news.load
        metrics.running.set(load.running)
        metrics.waiting.set(load.waiting)
        for state, count in (
            ("free", load.free_blocks),
            ("cached", load.cached_blocks),
            ("used", load.used_blocks),
        ):
            metrics.blocks.labels(state).set(count)
