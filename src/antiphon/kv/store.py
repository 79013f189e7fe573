"""The `BlockStore` seam: values by key, shared by all workers.

Implementations: `redisstore.RedisStore` and `memorystore.MemoryStore`; one contract suite runs over
both. Thread-safe and blocking; every call ends by its timeout. A store knows neither blocks nor MACs:
keys and values are opaque. What cannot be had is a miss, never an exception: `get_run` reports a
fault beside what it got.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class FaultKind(enum.StrEnum):
    """Why a store did not do what it was asked. One mapping for every implementation."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"  # refused, reset, closed, no such socket
    OUT_OF_MEMORY = "out_of_memory"  # -OOM: writes refused, reads go on
    LOADING = "loading"
    MISCONFIGURED = "misconfigured"  # -MISCONF: persistence fails, writes refused
    READ_ONLY = "read_only"
    DENIED = "denied"  # -NOAUTH, -NOPERM, -WRONGPASS
    MOVED = "moved"  # -MOVED, -ASK, -CLUSTERDOWN, -TRYAGAIN that one retry did not settle
    FULL = "full"  # max number of clients
    MALFORMED = "malformed"  # not the protocol
    OTHER = "other"


class StoreFault(Exception):
    """A call failed as a whole. The connection it used is gone where its state is unknown."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Run:
    """What `get_run` brought: one entry a key, in order; None where there is none or it was not asked."""

    values: list[bytes | None]
    seconds: float
    fault: StoreFault | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(value) for value in self.values if value is not None)


class BlockStore(Protocol):
    """Values of up to 4 MiB by key. Implementations are thread-safe."""

    def get_run(self, keys: Sequence[str], timeout_s: float) -> Run:
        """Get a chain's values in order, stopping soon after the first one missing. Never raises."""
        ...

    def put(self, key: str, value: bytes, ttl_ms: int, timeout_s: float) -> bool:
        """Store unless it is there; True if stored. Raises StoreFault."""
        ...

    def touch(self, ttls_ms: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
        """Let these keys live so much longer from now. Whether each is there. Raises StoreFault."""
        ...

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        """How many were there. Raises StoreFault."""
        ...

    def ping(self, timeout_s: float) -> float:
        """Seconds of a round trip that the server itself answered. Raises StoreFault."""
        ...

    def close(self) -> None:
        """Drop every connection. Calls in flight end with a fault."""
        ...
