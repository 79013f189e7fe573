"""How long a block lives in the store, counted from its last use.

Redis' `volatile-ttl` evicts what would expire first. So the TTL is the order of eviction: a block
lives shorter than every block before it in its chain, and what is taken first are leaves, never
the middle of a chain (a hole makes all that follows worthless). The curve is steep where most chains
end and never flat: block 4,000 still lives shorter than block 3,999.

Pure. TTLs are relative: the store's clock alone counts them down.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.blockhash import BlockHash


@dataclass(frozen=True, slots=True)
class TtlPolicy:
    """`first_s` for the first block of a chain, half of the way to `least_s` at block `half_blocks`."""

    first_s: float = 3600.0
    least_s: float = 600.0
    half_blocks: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.least_s < self.first_s or self.half_blocks < 1:
            raise ValueError(f"a TTL falls from first_s to least_s > 0: {self}")

    def ttl_ms(self, index: int, block_hash: BlockHash) -> int:
        """Milliseconds a block at `index` of its chain lives.

        Spread by a part of its hash over at most half the way to the next block, so that blocks written
        together do not expire together and the order within a chain stays.
        """
        here = self._curve_s(index)
        spread = block_hash[0] / 256 / 2
        return round(1000 * (here - spread * (here - self._curve_s(index + 1))))

    def _curve_s(self, index: int) -> float:
        return self.least_s + (self.first_s - self.least_s) * self.half_blocks / (self.half_blocks + index)
