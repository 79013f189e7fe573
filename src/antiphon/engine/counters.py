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
    placed_blocks: int = 0  # of those, that the sequence they came for began with
    import_s: float = 0.0  # what taking those over and copying them into place cost
    open_s: float = 0.0  # spent on beginning sequences
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
    open_s: float = 0.0  # of `seconds`, beginning sequences: no token is computed meanwhile
    num_imported_blocks: int = 0  # from tiers beyond the engine, for sequences that began
    import_s: float = 0.0  # what those cost, in this step and when they came

    @classmethod
    def between(cls, before: Counters, after: Counters, num_tokens: list[int], seconds: float) -> StepReport:
        """A step of so many tokens for each sequence, by what the counters said before and after it."""
        return cls(
            num_sequences=len(num_tokens),
            num_tokens=sum(num_tokens),
            seconds=seconds,
            num_prefill_tokens=after.prefill_tokens - before.prefill_tokens,
            open_s=after.open_s - before.open_s,
            num_imported_blocks=after.placed_blocks - before.placed_blocks,
            import_s=after.import_s - before.import_s,
        )
