"""Reads runs of blocks from a store and hands on only what the codec has proven.

The first block that is missing, or not what its key promises, ends a run: what lies behind it is not
looked at. Blocks that came, values that are spoilt and calls that failed are told to the hooks. Blocks
the caller; every call ends by its timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.core.clock import Clock
from antiphon.core.kvblock import KvBlock
from antiphon.kv.codec import BadValue, BadValueReason, BlockCodec
from antiphon.kv.flights import Outcome
from antiphon.kv.hosttier import Payload
from antiphon.kv.store import BlockStore, FaultKind, StoreFault


class FetchHooks(Protocol):
    """What the rest of the cache does about a fetch. Called on fetch threads, without the lock."""

    def landed(self, blocks: Sequence[tuple[KvBlock, Payload]]) -> None:
        """Proven blocks came."""
        ...

    def missed(self, blocks: Sequence[KvBlock]) -> None:
        """The store does not have the first of these; nobody looked for the others, which follow it."""
        ...

    def spoiled(self, block: KvBlock, reason: BadValueReason) -> None:
        """What lies under its key is not it."""
        ...

    def failed(self, fault: StoreFault) -> None:
        """A call failed."""
        ...


@dataclass(frozen=True, slots=True)
class Got:
    """What one call to the store brought: the proven blocks before the first miss."""

    blocks: Sequence[KvBlock]  # asked for
    payloads: list[Payload]
    fault: StoreFault | None
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(len(payload) for payload in self.payloads)

    @property
    def end(self) -> Outcome | None:
        """Why nothing can follow; None where something can."""
        if len(self.payloads) == len(self.blocks):
            return None
        if self.fault is None:
            return Outcome.MISSED
        return Outcome.LATE if self.fault.kind is FaultKind.TIMEOUT else Outcome.FAULT


class ProvenReader:
    """Immutable: any thread may use it."""

    def __init__(self, store: BlockStore, codec: BlockCodec, clock: Clock, hooks: FetchHooks) -> None:
        self._store = store
        self._codec = codec
        self._clock = clock
        self._hooks = hooks

    def get(self, blocks: Sequence[KvBlock], timeout_s: float) -> Got:
        """What the store has of these, in order, up to the first that cannot be used."""
        started_s = self._clock.now()
        run = self._store.get_run([self._codec.key(block) for block in blocks], timeout_s)
        payloads: list[Payload] = []
        for block, value in zip(blocks, run.values, strict=True):
            if value is None:
                break
            try:
                payloads.append(self._codec.decode(block, value))
            except BadValue as bad:
                self._hooks.spoiled(block, bad.reason)
                break
        got = Got(blocks, payloads, run.fault, self._clock.now() - started_s)
        if payloads:
            self._hooks.landed(list(zip(blocks, payloads, strict=False)))
        if run.fault is not None:
            self._hooks.failed(run.fault)
        return got
