"""Chains of KV blocks, a store that does as it is told, and a place where deliveries arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from antiphon.core.blockhash import Border, extend_chain, root_of
from antiphon.core.clock import Clock, WallClock
from antiphon.core.kvblock import KvBlock, Prefix
from antiphon.kv.cache import Delivery, KvCache, KvCacheSettings
from antiphon.kv.codec import BlockCodec
from antiphon.kv.gate import GateSettings, Rates
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.mackeys import MacKeys
from antiphon.kv.memorystore import MemoryStore
from antiphon.kv.store import BlockStore, FaultKind, Run, StoreFault
from support.kvvalues import KEYS, NAMESPACE, SCOPE

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
PATIENCE_S = 20.0  # of tests; nothing should need it

CODEC = BlockCodec(NAMESPACE, KEYS)


def chain(num: int, *, start: int = 0, scope: bytes = SCOPE, num_public: int = 0) -> list[KvBlock]:
    """`num` blocks of one prompt, the first `num_public` of them public."""
    ids = list(range(start, start + num * BLOCK_TOKENS))
    border = Border(num_public * BLOCK_TOKENS, scope)
    hashes: list[bytes] = []
    root = root_of(NAMESPACE, scope, num_public * BLOCK_TOKENS, BLOCK_TOKENS)
    extend_chain(hashes, root, ids, BLOCK_TOKENS, border)
    return [
        KvBlock(
            block_hash,
            index,
            tuple(ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]),
            border.scope_of(index, BLOCK_TOKENS),
        )
        for index, block_hash in enumerate(hashes)
    ]


def payload_of(block: KvBlock, num_bytes: int = BLOCK_BYTES) -> bytes:
    """The one payload this block can have."""
    return blake3(block.hash + b"payload").digest(num_bytes)


def with_payloads(blocks: Sequence[KvBlock]) -> list[tuple[KvBlock, bytes]]:
    """Each block and its payload."""
    return [(block, payload_of(block)) for block in blocks]


def prefix_of(blocks: Sequence[KvBlock], generation: str = "g", num_local: int = 0) -> Prefix:
    """A prompt that ends a little after its last full block."""
    return Prefix(generation, tuple(blocks), num_local, len(blocks) * BLOCK_TOKENS + 3)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that says nothing when it happens."""
    pause, rounds = threading.Event(), int(PATIENCE_S / 0.01)
    assert any(condition() or pause.wait(0.01) for _ in range(rounds))


class Inbox:
    """Takes deliveries, and waits for them."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.all: list[Delivery] = []

    def __call__(self, delivery: Delivery) -> None:
        with self._news:
            self.all.append(delivery)
            self._news.notify_all()

    def wait(self, num: int = 1) -> list[Delivery]:
        """The first `num` deliveries."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.all) >= num, PATIENCE_S), f"only {len(self.all)} came"
            return self.all[:num]

    def one(self) -> Delivery:
        """The only delivery there is."""
        (delivery,) = self.wait()
        return delivery


@dataclass
class PuppetStore:
    """A store in memory whose calls fail, or stand still until they are let go, when told to."""

    inner: MemoryStore = field(default_factory=lambda: MemoryStore(WallClock(), 2**30))
    fault: FaultKind | None = None  # every call ends so
    write_fault: FaultKind | None = None  # so do writes only
    bug: Exception | None = None  # every call raises this, which no store should
    is_held: bool = False  # calls stand still, whatever their timeout says

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self.runs: list[list[str]] = []  # keys asked for, by call
        self.num_pings = 0
        self.num_puts = 0

    def hold(self) -> None:
        """Calls from now on do not return."""
        with self._news:
            self.is_held = True

    def let_go(self) -> None:
        """Held calls go on, and later ones pass."""
        with self._news:
            self.is_held = False
            self._news.notify_all()

    def await_that(self, condition: Callable[[], bool]) -> None:
        """Until this holds; it is looked at with every call that comes in."""
        with self._news:
            assert self._news.wait_for(condition, PATIENCE_S)

    def get_run(self, keys: Sequence[str], timeout_s: float) -> Run:
        self._enter(lambda: self.runs.append(list(keys)))
        if self.fault is not None:
            return Run([None] * len(keys), 0.0, StoreFault(self.fault, "as told"))
        return self.inner.get_run(keys, timeout_s)

    def put(self, key: str, value: bytes, ttl_ms: int, timeout_s: float) -> bool:
        def count() -> None:
            self.num_puts += 1

        self._enter(count)
        self._raise(self.fault or self.write_fault)
        return self.inner.put(key, value, ttl_ms, timeout_s)

    def touch(self, ttls_ms: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
        self._enter(lambda: None)
        self._raise(self.fault or self.write_fault)
        return self.inner.touch(ttls_ms, timeout_s)

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        self._enter(lambda: None)
        self._raise(self.fault or self.write_fault)
        return self.inner.delete(keys, timeout_s)

    def ping(self, timeout_s: float) -> float:
        def count() -> None:
            self.num_pings += 1

        self._enter(count)
        self._raise(self.fault)
        return 0.0001

    def close(self) -> None:
        self.let_go()
        self.inner.close()

    def _enter(self, note: Callable[[], None]) -> None:
        with self._news:
            note()
            self._news.notify_all()
            self._news.wait_for(lambda: not self.is_held, PATIENCE_S)
        if self.bug is not None:
            raise self.bug

    def _raise(self, kind: FaultKind | None) -> None:
        if kind is not None:
            raise StoreFault(kind, "as told")


class Tales:
    """What the alarm told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def __call__(self, kind: str, detail: str) -> None:
        self.told.append((kind, detail))

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.told}


def make_cache(
    store: BlockStore | None,
    *,
    host_bytes: int = 0,
    patience_s: float = 1.0,
    prefill_tokens_per_s: float = 100.0,
    keys: MacKeys = KEYS,
    clock: Clock | None = None,
    tell: Callable[[str, str], None] | None = None,
) -> KvCache:
    """A cache whose engine is so slow that fetching always pays."""
    settings = KvCacheSettings(
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        host=HostSettings(budget_bytes=host_bytes),
        gate=GateSettings(patience_s=patience_s),
        rates=Rates(prefill_tokens_per_s=prefill_tokens_per_s),
    )
    remote = None if store is None else (store, BlockCodec(NAMESPACE, keys))
    return KvCache(settings, remote, clock or WallClock(), tell or Tales())
