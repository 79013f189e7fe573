"""The draw of an id by weights: a race in which each id arrives after a time of its own.

Id i arrives at E(key, i) ÷ weight(i), E exponential; the first one wins, and so each wins with its share of
the weight. E is a hash of key and id, so a race is a pure function, and a weight that moves a little
moves one arrival a little: two rows of logits that differ by rounding, as a model gives in another batch
shape, choose another id only about as often as their distributions differ. (The inverse of the cumulated
distribution, which this replaced, changed 42 of 60 draws where this changed 1: docs/adr/0003.)

Ids of little weight run as one pack, which costs one draw instead of tens of thousands; only if the pack
wins do they race among themselves. That is exact: the first of them arrives when the pack does.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Row: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.intp]
_Words: TypeAlias = NDArray[np.uint64]

_PACK_BELOW = np.float32(1e-3)  # of the highest weight
_PACK = np.array([-1], dtype=np.intp)  # no id

# SplitMix64 (Steele, Lea, Flood 2014): a word of its sequence is a hash of its index.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _SHIFT_BITS = (np.uint64(n) for n in (30, 27, 31, 11))


def race(weights: Row, ids: Ids | None, key: int) -> int:
    """The index of the winner. Weights are at most 1, one of them is 1; those of 0 never win.

    `ids` names them for the draw; None: by their indices. `key` is below 2**64.
    """
    strong = np.flatnonzero(weights >= _PACK_BELOW)
    arrivals = _exponentials(key, strong if ids is None else ids[strong]) / weights[strong]
    first = int(arrivals.argmin())
    if strong.size < weights.size:
        pack = float(weights.sum(dtype=np.float64) - weights[strong].sum(dtype=np.float64))
        if pack > 0.0 and float(_exponentials(key, _PACK)[0]) / pack < arrivals[first]:
            weak = np.flatnonzero((weights < _PACK_BELOW) & (weights > 0.0))
            if weak.size:
                named = weak if ids is None else ids[weak]
                return int(weak[(_exponentials(key, named) / weights[weak]).argmin()])
    return int(strong[first])


def _exponentials(key: int, ids: Ids) -> NDArray[np.float64]:
    """A draw of the standard exponential distribution for each id."""
    words: _Words = ids.astype(np.uint64)
    words = (words + np.uint64(1)) * _GAMMA + np.uint64(key)
    words = (words ^ (words >> _SHIFT_1)) * _MIX_1
    words = (words ^ (words >> _SHIFT_2)) * _MIX_2
    words ^= words >> _SHIFT_3
    uniform = np.asarray((words >> _SHIFT_BITS) + np.uint64(1), np.float64) * 2.0**-53  # in (0, 1]
    arrivals: NDArray[np.float64] = -np.log(uniform)
    return arrivals
