"""The time a call to a store may take in all: every wait inside it asks what is left."""

from __future__ import annotations

import time

from antiphon.kv.store import FaultKind, StoreFault


class Deadline:
    """Runs from its making. On the machine's clock, as the kernel's own socket timeouts are."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds, more than 0. Raises StoreFault when time is up."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise self.fault()
        return left_s

    def fault(self) -> StoreFault:
        """What to raise when it has passed."""
        return StoreFault(FaultKind.TIMEOUT, f"no answer within {self.timeout_s:.3g} s")
