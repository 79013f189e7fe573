"""How fast this worker is, measured by itself: what a router weighs, and what its own cost gate goes by.

Owns which steps say something. A step whose tokens are mostly a prompt's says how fast prompts are
computed, a short one does not; a step of answers alone says what a token's wait is. The time that
beginning sequences took (copying blocks into place) is no computing and is taken off.

Pure; one thread. What the shared store can do is the gate's knowledge (kv/gate.py), only put into the
router's units here.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.generation import WorkerRates
from antiphon.engine.counters import StepReport
from antiphon.kv.gate import Rates, running_mean

_LEAST_PREFILL_TOKENS = 16
_LEAST_PREFILL_SHARE = 0.75
_WEIGHT = 0.1  # of a new sample


@dataclass(frozen=True, slots=True)
class TierRates:
    """What the KV tiers go by. `uses_store` False: nothing is shared with others now."""

    rates: Rates
    block_bytes: int
    uses_store: bool


def computing_s(step: StepReport) -> float:
    """Seconds of a step that were not spent on beginning sequences."""
    return step.seconds - step.open_s


def is_prefill(step: StepReport) -> bool:
    """Whether it shows how fast prompts are computed."""
    least = max(_LEAST_PREFILL_TOKENS, _LEAST_PREFILL_SHARE * step.num_tokens)
    return step.num_prefill_tokens >= least


def is_decode(step: StepReport) -> bool:
    """Whether each of its tokens is the next one of an answer."""
    return step.num_prefill_tokens == 0 and step.num_tokens == step.num_sequences > 0


class Speedometer:
    """Running means over the steps of an engine."""

    def __init__(self) -> None:
        self._prefill_tokens_per_s = 0.0
        self._step_s = 0.0
        self._num_steps = 0

    def start(self, prefill_tokens_per_s: float) -> None:
        """What was measured before the first step; 0: nothing was."""
        self._prefill_tokens_per_s = prefill_tokens_per_s

    def take(self, num_steps: int, step: StepReport) -> None:
        """The engine's last step, and how many there were: each counts once, however often it is told."""
        if num_steps <= self._num_steps:
            return
        self._num_steps = num_steps
        seconds = computing_s(step)
        if seconds <= 0.0:
            return
        if is_prefill(step):
            self._prefill_tokens_per_s = _mean(self._prefill_tokens_per_s, step.num_prefill_tokens / seconds)
        elif is_decode(step):
            self._step_s = _mean(self._step_s, seconds)

    def rates(self, tiers: TierRates | None) -> WorkerRates:
        """What is known now; None: there are no KV tiers."""
        own = WorkerRates(self._prefill_tokens_per_s, self._step_s)
        if tiers is None:
            return own
        known = tiers.rates
        return WorkerRates(
            prefill_tokens_per_s=own.prefill_tokens_per_s,
            step_s=own.step_s,
            store_rtt_s=known.rtt_s if tiers.uses_store else 0.0,
            store_blocks_per_s=1 / (known.byte_s * tiers.block_bytes) if tiers.uses_store else 0.0,
            import_s_per_block=known.import_byte_s * tiers.block_bytes,
        )


def _mean(old: float, sample: float) -> float:
    return running_mean(old, sample, _WEIGHT) if old > 0.0 else sample
