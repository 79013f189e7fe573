"""The `BlockStore` in this process' memory: for one process without Redis, for tests and simulation.

Behaves as the Redis it stands for: a value is never replaced, lives as long as its TTL, and where
room is short what expires soonest goes first (volatile-ttl).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from antiphon.core.clock import Clock
from antiphon.kv.store import FaultKind, Run, StoreFault


class MemoryStore:
    """See store.BlockStore. Holds at most `max_bytes` of values."""

    def __init__(self, clock: Clock, max_bytes: int) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._ends_s: dict[str, float] = {}  # of the same keys
        self._num_bytes = 0
        self._is_closed = False

    def get_run(self, keys: Sequence[str], timeout_s: float) -> Run:
        started_s = self._clock.now()
        values: list[bytes | None] = [None] * len(keys)
        with self._lock:
            if self._is_closed:
                return Run(values, 0.0, _closed())
            self._expire()
            for index, key in enumerate(keys):
                values[index] = self._values.get(key)
                if values[index] is None:
                    break
        return Run(values, self._clock.now() - started_s)

    def put(self, key: str, value: bytes, ttl_ms: int, timeout_s: float) -> bool:
        with self._lock:
            self._check_open()
            self._expire()
            if key in self._values:
                return False
            if len(value) > self._max_bytes:
                raise StoreFault(FaultKind.OUT_OF_MEMORY, f"{len(value)} bytes into {self._max_bytes}")
            while self._num_bytes + len(value) > self._max_bytes:
                self._drop(min(self._ends_s, key=self._ends_s.__getitem__))
            self._values[key] = value
            self._ends_s[key] = self._clock.now() + ttl_ms / 1000
            self._num_bytes += len(value)
            return True

    def touch(self, ttls_ms: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
        with self._lock:
            self._check_open()
            self._expire()
            for key, ttl_ms in ttls_ms:
                if key in self._values:
                    self._ends_s[key] = self._clock.now() + ttl_ms / 1000
            return [key in self._values for key, _ in ttls_ms]

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        with self._lock:
            self._check_open()
            self._expire()
            found = {key for key in keys if key in self._values}
            for key in found:
                self._drop(key)
            return len(found)

    def ping(self, timeout_s: float) -> float:
        with self._lock:
            self._check_open()
            return 0.0

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._values.clear()
            self._ends_s.clear()
            self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of the values that are held now."""
        with self._lock:
            self._expire()
            return self._num_bytes

    def _expire(self) -> None:
        now_s = self._clock.now()
        for key in [key for key, end_s in self._ends_s.items() if end_s <= now_s]:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._num_bytes -= len(self._values.pop(key))
        del self._ends_s[key]

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()


def _closed() -> StoreFault:
    return StoreFault(FaultKind.UNREACHABLE, "the store was closed")
