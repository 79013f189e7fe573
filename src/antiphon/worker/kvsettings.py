"""What a worker is told about the KV tiers behind its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

KV_TYPES = ("f16", "q8_0", "q4_0")
CHECKPOINT_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """How KV is kept. Without `store_url` there is the host tier only; with it `key_file` is there.

    `store_url` may hold a password: it is not shown.
    """

    store_url: str | None = field(default=None, repr=False)
    key_file: Path | None = None  # MAC keys, shared by all workers that share a store
    host_bytes: int = 0  # budget of the host tier; 0: none
    kv_type: str = KV_TYPES[0]  # of K and V in the engine, and so in every tier
    checkpoint_blocks: int = CHECKPOINT_BLOCKS  # a long answer is exported every so many blocks

    @property
    def is_used(self) -> bool:
        """Whether there is any tier behind the engine."""
        return self.store_url is not None or self.host_bytes > 0
