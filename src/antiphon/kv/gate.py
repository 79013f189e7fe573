"""The cost gate: fetch blocks or compute them, whichever is expected to be over sooner.

Fetching costs the bytes already under way plus these, a round trip, the import, and the round trips
lost where nothing is there; computing costs tokens at the measured prefill rate. A fetch has to win by
`safety`. Its first block must also be expected within what a request may wait for nothing (`patience_s`),
from when it is asked for: later it would only be cut off. Bytes before it do not count there: as long as
they come, waiting for them is no loss (`flights.py`).

All rates are measured, each as a running mean of its logarithm: a store that took 0.2 ms, then 500 ms,
then 0.2 ms again is believed after few samples, in either direction, and a sample that is slower never
makes a rate better. Where the gate says no, no samples would come in; its holder keeps measuring off
the request path (`fetcher.py`), so that a store that healed is noticed.

Pure; not thread-safe: its holder has a lock. Seconds and bytes throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GateSettings:
    """`patience_s`: longest a request waits for the store beyond what the wait has saved it already.

    35 ms, so that with late timers and the engine's step border it stays below 50 (`bench kv-slow-redis`).
    """

    patience_s: float = 0.035
    safety: float = 1.25
    most_batch_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.patience_s <= 0 or self.safety < 1:
            raise ValueError(f"a gate needs patience and a safety factor of at least 1: {self}")


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known of both sides. The defaults are guesses that stand until something was measured."""

    rtt_s: float = 0.0005
    byte_s: float = 1e-9  # 1 GB/s, verified bytes
    import_byte_s: float = 0.5e-9
    hit_share: float = 0.5  # of the blocks asked for, those that were there
    prefill_tokens_per_s: float = 2000.0


@dataclass(frozen=True, slots=True)
class Ask:
    """Blocks that could be fetched, and the bytes that lie in the queue before them."""

    num_blocks: int
    block_bytes: int
    block_tokens: int
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's word, and the two times it weighed."""

    fetch: bool
    fetch_s: float
    compute_s: float


def judge(ask: Ask, rates: Rates, settings: GateSettings) -> Verdict:
    """Whether fetching wins. Anything that makes the store slower never turns a no into a yes."""
    num_bytes = ask.num_blocks * ask.block_bytes
    first_s = rates.rtt_s + ask.block_bytes * rates.byte_s
    in_vain_s = rates.rtt_s * (1 - rates.hit_share) / rates.hit_share
    fetch_s = (
        rates.rtt_s
        + (ask.queued_bytes + num_bytes) * rates.byte_s
        + num_bytes * rates.import_byte_s
        + in_vain_s
    )
    compute_s = ask.num_blocks * ask.block_tokens / rates.prefill_tokens_per_s
    wins = settings.safety * fetch_s < compute_s and first_s <= settings.patience_s
    return Verdict(wins, fetch_s, compute_s)


_LEAST_HIT_SHARE = 0.02  # a store that never hit is still asked where the prize is 50 round trips
_WEIGHT = 0.5  # of a new sample of the store
_SLOW_WEIGHT = 0.1  # of a new sample of what changes slowly: hits and the engine
_LEAST_S = 1e-6
_LEAST_BYTES_SHARE = 0.1  # of a fetch's seconds are its bytes', however long the round trip
_BATCH_SHARE = 0.3  # a batch may take three times as long as expected and still be of use
_OVERRUN = 4.0  # what was cut off would have taken longer than the wait: this many times


class Gate:
    """Holds the rates and learns."""

    def __init__(self, settings: GateSettings | None = None, rates: Rates | None = None) -> None:
        self.settings = settings or GateSettings()
        self.rates = rates or Rates()
        self._best = self.rates  # round trip and bytes as they were at their best

    def judge(self, ask: Ask) -> Verdict:
        return judge(ask, self.rates, self.settings)

    def hopes(self, ask: Ask) -> bool:
        """Whether fetching these would win, were the store as fast as it has ever been."""
        at_best = replace(self.rates, rtt_s=self._best.rtt_s, byte_s=self._best.byte_s)
        return judge(ask, at_best, self.settings).fetch

    def compute_s(self, num_tokens: int) -> float:
        """Seconds of prefill these tokens would take."""
        return num_tokens / self.rates.prefill_tokens_per_s

    def batch_blocks(self, block_bytes: int) -> int:
        """How many blocks to ask for at once: what comes in part of the patience, so that progress shows."""
        in_time = _BATCH_SHARE * self.settings.patience_s / self.rates.byte_s
        return max(1, int(min(in_time, self.settings.most_batch_bytes) // block_bytes))

    def observe_ping(self, seconds: float) -> None:
        """A round trip that carried nothing."""
        self._adopt(replace(self.rates, rtt_s=running_mean(self.rates.rtt_s, seconds, _WEIGHT)))

    def observe_bytes(self, num_bytes: int, seconds: float) -> None:
        """Bytes that came in so many seconds, a round trip included."""
        carried_s = max(seconds - self.rates.rtt_s, _LEAST_BYTES_SHARE * seconds, _LEAST_S)
        rate = running_mean(self.rates.byte_s, carried_s / num_bytes, _WEIGHT)
        self._adopt(replace(self.rates, byte_s=rate))

    def observe_fetch(self, num_asked: int, num_got: int, num_bytes: int, seconds: float) -> None:
        """One pass over the store that ended by itself."""
        hit_share = self.rates.hit_share + _SLOW_WEIGHT * (num_got / num_asked - self.rates.hit_share)
        self.rates = replace(self.rates, hit_share=max(hit_share, _LEAST_HIT_SHARE))
        if num_bytes:
            self.observe_bytes(num_bytes, seconds)
        else:
            self.observe_ping(seconds)

    def observe_cut(self, num_asked_bytes: int, num_bytes: int, seconds: float) -> None:
        """One pass that was cut off by its deadline: what it brought, or at least how slow it was."""
        if num_bytes:
            self.observe_bytes(num_bytes, seconds)
        else:
            slowest = max(_OVERRUN * seconds, self.rates.byte_s * num_asked_bytes)
            self.observe_bytes(num_asked_bytes, slowest)

    def observe_import(self, num_bytes: int, seconds: float) -> None:
        """What it took the engine to take blocks over."""
        if num_bytes:
            sample = max(seconds, _LEAST_S) / num_bytes
            rate = running_mean(self.rates.import_byte_s, sample, _SLOW_WEIGHT)
            self.rates = replace(self.rates, import_byte_s=rate)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Prompt tokens computed in so many seconds of the engine's time, whatever else ran in them."""
        if num_tokens:
            rate = running_mean(
                self.rates.prefill_tokens_per_s, num_tokens / max(seconds, _LEAST_S), _SLOW_WEIGHT
            )
            self.rates = replace(self.rates, prefill_tokens_per_s=rate)

    def _adopt(self, rates: Rates) -> None:
        self.rates = rates
        best = self._best
        self._best = replace(best, rtt_s=min(best.rtt_s, rates.rtt_s), byte_s=min(best.byte_s, rates.byte_s))


def running_mean(old: float, sample: float, weight: float) -> float:
    """The geometric mean of both, the sample counting `weight`: for rates, which differ by factors."""
    return math.exp((1 - weight) * math.log(old) + weight * math.log(max(sample, 1e-15)))
