"""KV tiers for tests of the bridge: one that does as it is told, and a real one that can be held up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from antiphon.core.blockhash import BlockHash
from antiphon.core.generation import KvReport
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from antiphon.kv.cache import KvCache
from antiphon.worker.kvbridge import Delivery
from support.kvchains import Inbox

Arrivals = list[tuple[KvBlock, bytes | memoryview, Tier]]


@dataclass(frozen=True)
class Parcel:
    """A delivery."""

    generation: str
    blocks: Arrivals
    report: KvReport = field(default_factory=lambda: KvReport(decision="fetched"))


@dataclass
class PuppetTier:
    """Implements `KvTier`. `broken`: the method that raises. What is begun waits for `deliver`."""

    broken: str = ""
    unwanted: set[int] = field(default_factory=set)  # block indices
    begun: dict[str, tuple[Prefix, Callable[[Delivery], None]]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    kept: list[tuple[KvBlock, bytes]] = field(default_factory=list)
    prefills: list[tuple[int, float]] = field(default_factory=list)
    imports: list[tuple[int, float]] = field(default_factory=list)
    lost: list[BlockHash] = field(default_factory=list)  # to be told at the next chance
    is_writing: bool = False  # what was kept is not written before `written` is called
    waiting: list[Callable[[], None]] = field(default_factory=list)
    num_calls: int = 0
    on_keep: Callable[[], None] = lambda: None

    def begin(self, prefix: Prefix, deliver: Callable[[Delivery], None]) -> None:
        self._enter("begin")
        self.begun[prefix.generation] = (prefix, deliver)

    def cancel(self, generation: str) -> None:
        self._enter("cancel")
        self.cancelled.append(generation)

    def forget(self, tenants: Collection[bytes]) -> None:
        self._enter("forget")
        self.forgotten += tenants

    def wants(self, block: KvBlock) -> bool:
        self._enter("wants")
        return block.index not in self.unwanted

    def keep(self, blocks: Sequence[tuple[KvBlock, bytes]]) -> None:
        self._enter("keep")
        self.on_keep()
        self.kept += blocks

    def when_written(self, call: Callable[[], None]) -> None:
        self._enter("when_written")
        if self.is_writing:
            self.waiting.append(call)
        else:
            call()

    def written(self) -> None:
        """All that was kept is written."""
        calls, self.waiting = self.waiting, []
        for call in calls:
            call()

    def take_lost(self) -> Collection[BlockHash]:
        self._enter("take_lost")
        lost, self.lost = self.lost, []
        return lost

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._enter("observe_prefill")
        self.prefills.append((num_tokens, seconds))

    def observe_import(self, num_blocks: int, seconds: float) -> None:
        self._enter("observe_import")
        self.imports.append((num_blocks, seconds))

    def deliver(self, generation: str, blocks: Arrivals | None = None) -> None:
        """Answer a `begin` with these blocks."""
        _, deliver = self.begun[generation]
        deliver(Parcel(generation, blocks or []))

    def _enter(self, method: str) -> None:
        self.num_calls += 1
        if method == self.broken:
            raise RuntimeError("planted")


class Gatekeeper:
    """A `KvTier` over the real one that holds back deliveries and writes until they are let through."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self.unwritten: list[tuple[KvBlock, bytes]] = []
        self.waiting: list[tuple[Delivery, Callable[[Delivery], None]]] = []

    def begin(self, prefix: Prefix, deliver: Callable[[Delivery], None]) -> None:
        inbox = Inbox()
        self.cache.begin(prefix, inbox)
        self.waiting.append((inbox.one(), deliver))

    def let_all_through(self) -> None:
        """What waits arrives, whole."""
        while self.waiting:
            delivery, deliver = self.waiting.pop(0)
            deliver(delivery)

    def cancel(self, generation: str) -> None:
        self.cache.cancel(generation)

    def wants(self, block: KvBlock) -> bool:
        return self.cache.wants(block)

    def keep(self, blocks: Sequence[tuple[KvBlock, bytes]]) -> None:
        self.unwritten += blocks

    def when_written(self, call: Callable[[], None]) -> None:
        self.cache.when_written(call)

    def write_all(self) -> None:
        """The writer catches up."""
        self.cache.keep(self.unwritten)
        self.unwritten.clear()
        assert self.cache.drain(20.0)

    def take_lost(self) -> Collection[BlockHash]:
        return self.cache.take_lost()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        pass  # the machine's time stands still: every fetch is to pay

    def observe_import(self, num_blocks: int, seconds: float) -> None:
        pass  # likewise
