"""How long a block lives in the store, counted from its last use.

Redis' `volatile-ttl` evicts what would expire first, so TTLs are the order of eviction. Mostly that
is the order of use. Within a chain, whose blocks are used together, every block lives a little shorter
than the one before it: what is taken first are leaves, never the middle (a hole makes all that follows
worthless). The head start grows with the logarithm of the depth: never flat, and small against the time
that blocks stay. Were it large, deep blocks of conversations in use would go before the fronts of old
ones (`bench kv-evict`: lost blocks and hit rate, against LRU).

Pure. TTLs are relative: the store's clock alone counts them down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from antiphon.core.blockhash import BlockHash

_DEEPEST = 10**6  # blocks


@dataclass(frozen=True, slots=True)
class TtlPolicy:
    """`first_s` for the first block of a chain; `depth_s` less for each e-fold of the depth."""

    first_s: float = 3600.0
    depth_s: float = 20.0

    def __post_init__(self) -> None:
        if self.depth_s <= 0 or self._curve_s(_DEEPEST) <= 0:
            raise ValueError(f"TTLs fall with the depth and stay above 0: {self}")

    def ttl_ms(self, index: int, block_hash: BlockHash) -> int:
        """Milliseconds a block at `index` of its chain lives.

        Spread by a part of its hash over half of the way to the next block, so that equal depths do not
        expire together and the order within a chain stays.
        """
        here_s = self._curve_s(index)
        spread = block_hash[0] / 256 / 2
        return round(1000 * (here_s - spread * (here_s - self._curve_s(index + 1))))

    def _curve_s(self, index: int) -> float:
        return self.first_s - self.depth_s * math.log1p(index)
