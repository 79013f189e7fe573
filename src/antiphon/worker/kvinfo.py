"""What a worker's `/kv` pages say, as JSON, to whoever knows the workers' secret.

Owns the two forms, so that the page and `antiphon kv`, which reads it, cannot drift apart.
"""

from __future__ import annotations

import msgspec

from antiphon.kv.stats import KvStats


class KvInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`/kv`: what the blocks' bytes mean here, and what the tiers did so far."""

    worker: str
    model: str
    namespace: str  # hex
    block_tokens: int
    stats: KvStats


class KvHeld(msgspec.Struct, frozen=True, kw_only=True):
    """`/kv/held`: hashes in hex of the blocks in this worker's own tiers now."""

    engine: list[str]
    host: list[str]
