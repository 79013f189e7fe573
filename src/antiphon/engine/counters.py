"""What an engine counts of itself. Numbers only; metrics are made of them in the worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened since the start; only grows."""

    steps: int = 0
    prefill_tokens: int = 0  # prompt tokens computed
    decode_tokens: int = 0  # answer tokens chosen
    cached_tokens: int = 0  # prompt tokens found computed
    preemptions: int = 0
    evicted_blocks: int = 0
    failed_steps: int = 0
    imported_blocks: int = 0  # taken over from tiers beyond the engine
    refused_blocks: int = 0  # payloads the runner did not take
    exported_blocks: int = 0
    failed_exports: int = 0  # calls


@dataclass(frozen=True, slots=True)
class StepReport:
    """The shape of the last step, for metrics."""

    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_prefill_tokens: int = 0
