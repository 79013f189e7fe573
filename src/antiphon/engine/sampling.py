"""Chooses the next token from a row of logits. Pure: numpy in, ids out, no state but the penalty counts.

A choice is a function of (row, sampling, answer ids so far, choice index, position) and of nothing
else: not of the batch, not of earlier draws. The draw is a race (race.py) under a key made of (seed,
choice, position): logits that batch arithmetic moved a little seldom change the id.

The order of the filters is that of the fields of `Sampling`. Among equal logits the lowest id wins:
in greedy choice, at the edge of top_k, at the edge of top_p and among the reported logprobs.

Logprobs are those of the model: log-softmax of the raw row, before bias, penalties and
temperature, as OpenAI reports them (so a bias cannot be used to read logits out one by one).

Costs decide the means: an argsort of 49k floats takes 0.6 ms (4 ms if stable) and never happens.
Filters look for the VALUE at their edge (partition 0.05 ms; sort of values, only where top_p meets
a flat distribution, 0.13 ms) and then keep the ids above it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Sampling, TokenLogprobs
from antiphon.core.randomness import draw_key
from antiphon.engine.race import race

Row: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.intp]

LOGPROB_FLOOR = -9999.0  # reported instead of −inf, which JSON cannot say
GREEDY_BELOW = 1e-5  # temperatures under this are greedy: float32 could not tell them apart
_SUM_RUN = 256  # weights are cumulated in runs of this many, see _crossing
_CANDIDATES = 256  # top_p looks at this many first; most nuclei are smaller

_BARRED = np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min


class BadLogits(ValueError):
    """A row no token can be chosen from: it holds NaN or +inf, or every token is barred."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The next id of one choice, with its log probabilities where they were asked for."""

    id: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Chooses the ids of one choice of one generation.

    `choose` changes nothing; `accept` tells it which ids became part of the answer. After a
    failover the ids received so far are accepted again, in any order, and it goes on as before.
    """

    def __init__(self, sampling: Sampling, choice: int, vocab_size: int) -> None:
        """Raises BadRequest where logit_bias names an id outside the vocabulary."""
        self._sampling = sampling
        self._choice = choice
        self._counts: dict[int, int] = {}
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        outside = self._bias_ids[(self._bias_ids < 0) | (self._bias_ids >= vocab_size)]
        if outside.size:
            raise BadRequest(
                f"logit_bias names token {outside[0]}; this model's ids are 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        self._stop_ids = np.array(sampling.stop_ids, dtype=np.intp)
        self._is_penalised = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._is_greedy = sampling.temperature < GREEDY_BELOW

    def accept(self, token: int) -> None:
        """`token` is part of the answer now and counts for the penalties."""
        if self._is_penalised:
            self._counts[token] = self._counts.get(token, 0) + 1

    def choose(self, row: Row, position: int) -> Chosen:
        """The id for answer position `position` from float32 logits [vocab]. Raises BadLogits."""
        return self._choose(row, int(row.argmax()), position)

    def _choose(self, row: Row, best: int, position: int) -> Chosen:
        """As `choose`, for a row whose first highest logit is known to be at `best`."""
        _check(row[best])  # argmax finds a NaN before anything else
        scores = self._scores(row, position)
        if scores is not row:
            best = int(scores.argmax())
            _check(scores[best])
        token = best if self._is_greedy else self._sample(scores, scores[best], position)
        if self._sampling.logprobs is None:
            return Chosen(token)
        return Chosen(token, _logprobs(row, token, self._sampling.logprobs))

    def _scores(self, row: Row, position: int) -> Row:
        """Logits after bias, penalties and bars: `row` itself where there are none, else a copy."""
        bars = self._stop_ids.size > 0 and position < self._sampling.min_tokens
        if not (bars or self._counts or self._bias_ids.size):
            return row
        scores = row.copy()
        np.add.at(scores, self._bias_ids, self._bias)
        if self._counts:
            ids = np.fromiter(self._counts.keys(), dtype=np.intp, count=len(self._counts))
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            scores[ids] -= self._sampling.presence_penalty + self._sampling.frequency_penalty * counts
        if bars:
            scores[self._stop_ids] = _BARRED
        return scores

    def _sample(self, scores: Row, highest: np.float32, position: int) -> int:
        """Draw from `scores`, whose finite maximum is `highest`, after temperature and filters."""
        sampling = self._sampling
        ids: Ids | None = None  # None: all of them
        if 0 < sampling.top_k < scores.size:
            ids = _highest(scores, sampling.top_k)
            scores = scores[ids]
        with np.errstate(over="ignore"):  # −3e38 / 1e-5 is −inf, as it should be
            weights = np.exp((scores - highest) / np.float32(sampling.temperature))
        kept = _nucleus(weights, sampling.min_p, sampling.top_p)
        if kept is not None:
            weights = weights[kept]
            ids = kept if ids is None else ids[kept]
        index = race(weights, ids, draw_key(sampling.seed, self._choice, position))
        return index if ids is None else int(ids[index])


def choose_batch(
    logits: NDArray[np.float32], samplers: Sequence[Sampler], positions: Sequence[int]
) -> list[Chosen | BadLogits]:
    """Choose one id per row of `logits` [n, vocab] for its sampler, at its answer position.

    A row that is no good yields its BadLogits in its place: the others' sequences go on.
    """
    chosen: list[Chosen | BadLogits] = []
    best = logits.argmax(axis=1).tolist() if len(samplers) else []
    for row, sampler, top, position in zip(logits, samplers, best, positions, strict=True):
        try:
            chosen.append(sampler._choose(row, top, position))
        except BadLogits as fault:
            chosen.append(fault)
    return chosen


def _check(highest: np.float32) -> None:
    if not math.isfinite(highest):
        raise BadLogits(
            "every token is barred" if highest == -math.inf else f"the model's logits hold {highest}"
        )


def _highest(scores: Row, num: int) -> Ids:
    """Ids, ascending, of the `num` highest scores above −inf; among equals the lowest ids."""
    if num >= scores.size:
        return np.flatnonzero(scores >= _LOWEST)
    edge = np.partition(scores, scores.size - num)[scores.size - num]
    return _cut(scores, max(edge, _LOWEST), num)


def _cut(scores: Row, edge: np.float32, num: int) -> Ids:
    """Ids, ascending, of the first `num` scores no lower than `edge`, the `num`-th highest."""
    ids = np.flatnonzero(scores >= edge)
    surplus = ids.size - num
    if surplus <= 0:
        return ids
    equal = np.flatnonzero(scores[ids] == edge)
    return np.delete(ids, equal[equal.size - surplus :])


def _nucleus(weights: Row, min_p: float, top_p: float) -> Ids | None:
    """Indices, ascending, of the weights that min_p and top_p keep; None where they keep all.

    `weights` are probabilities up to a factor, the highest is 1. min_p keeps those of at least
    `min_p` times the highest. Of what is left, top_p keeps the fewest highest ones that together
    reach the share `top_p`; the highest is always kept.
    """
    kept: Ids | None = None
    if min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(min(min_p, 1.0)))
        weights = weights[kept]
    if top_p >= 1.0:
        return kept
    goal = top_p * float(weights.sum(dtype=np.float64))
    is_short = weights.size <= _CANDIDATES
    highest = weights if is_short else np.partition(weights, -_CANDIDATES)[-_CANDIDATES:]
    if not is_short and highest.sum(dtype=np.float64) < goal:
        highest = weights
    highest = np.sort(highest)[::-1]
    num = _crossing(highest, goal) + 1
    nucleus = _cut(weights, highest[num - 1], num)
    return nucleus if kept is None else kept[nucleus]


def _crossing(weights: Row, goal: float) -> int:
    """The first index whose cumulated weight reaches `goal`.

    Sums runs first and cumulates inside one of them: numpy takes 150 µs or more to cumulate 49k
    floats and 30 to sum them.
    """
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _SUM_RUN), dtype=np.float64)
    run, rest = _crossing_and_rest(sums, goal)
    start = run * _SUM_RUN
    return start + _crossing_and_rest(weights[start : start + _SUM_RUN], rest)[0]


def _crossing_and_rest(weights: NDArray[np.floating], goal: float) -> tuple[int, float]:
    """As `_crossing`, with what of the goal lies inside that index.

    Where rounding leaves the goal beyond the total it is the last index of positive weight.
    """
    cumulated = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulated, goal, side="left"))
    index = min(index, int(np.searchsorted(cumulated, cumulated[-1], side="left")))
    return index, goal - (float(cumulated[index - 1]) if index else 0.0)


def _logprobs(row: Row, token: int, num: int) -> TokenLogprobs:
    """Log probabilities of `token` and of the `num` most likely ids, of the raw row."""
    highest = row.max()
    total = float(highest) + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    top = _highest(row, num) if num else np.empty(0, dtype=np.intp)
    top = top[np.argsort(-row[top], kind="stable")]  # best first, equal ones in order of id
    return TokenLogprobs(
        max(float(row[token]) - total, LOGPROB_FLOOR),
        [(int(id), max(float(row[id]) - total, LOGPROB_FLOOR)) for id in top],
    )
