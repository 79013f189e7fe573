"""How close a weight format comes to its source, from the logits of both on the same text.

Perplexity alone cannot say it. llama.cpp rounds activations in some formats and not in others, so
even the source's very weights, written as F32, move the perplexity of a few hundred tokens by half a
percent (SmolLM2-135M from Q4_1: +0.46 % ± 0.33). So its change is judged beyond twice its standard
error, and the divergence of the distributions, which barely varies by chance, must be small too
(same model: F32 0.0025, BF16 0.0026, Q8_0 0.0045, Q6_K 0.010, Q4_K_M 0.051, Q4_0 0.25).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]  # [tokens, vocab]

MAX_PERPLEXITY_CHANGE = 0.005
MAX_DIVERGENCE = 0.01
_ROWS = 64  # compared at a time: float64 copies of all rows would take gigabytes


class Closeness(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's text figures; changes are against the source."""

    perplexity: float
    perplexity_change: float  # 0.01: one percent worse
    perplexity_error: float  # standard error of that change
    divergence: float  # mean Kullback-Leibler divergence from the source, in nats a token
    mean_logit_change: float
    max_logit_change: float

    @property
    def is_near_lossless(self) -> bool:
        """Whether the format may be served without a person naming it."""
        surely_changed = abs(self.perplexity_change) - 2 * self.perplexity_error
        return surely_changed <= MAX_PERPLEXITY_CHANGE and self.divergence <= MAX_DIVERGENCE


def compare(candidate: Logits, source: Logits, ids: list[int]) -> Closeness:
    """Compare logits on one text; row i predicts `ids[i + 1]`, the last row counts for nothing."""
    losses, changes, divergences, moves, largest = [], [], [], [], 0.0
    for rows in _slices(len(ids) - 1):
        next_ids = np.array(ids[rows.start + 1 : rows.stop + 1])
        ours, theirs = _log_softmax(candidate[rows]), _log_softmax(source[rows])
        at = np.arange(len(next_ids)), next_ids
        losses.append(-ours[at])
        changes.append(theirs[at] - ours[at])
        divergences.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
        moved = np.abs(candidate[rows] - source[rows])
        moves.append(moved.mean(axis=1))
        largest = max(largest, float(moved.max()))
    change = np.concatenate(changes)
    return Closeness(
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        perplexity_change=math.expm1(change.mean()),
        perplexity_error=float(change.std() / math.sqrt(len(change))),
        divergence=float(np.concatenate(divergences).mean()),
        mean_logit_change=float(np.concatenate(moves).mean()),
        max_logit_change=largest,
    )


def _slices(num_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + _ROWS, num_rows)) for start in range(0, num_rows, _ROWS))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows
