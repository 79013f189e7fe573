"""Between the engine and the KV tiers: what a waiting prompt gets from them, what they are given.

Called on the engine thread, so nothing here waits: the tier answers at once or posts its delivery to
the thread's inbox later. Outputs leave before blocks are copied out. Invariant: the tiers cost reuse at
worst, never an answer: a tier that raises is not asked again, and a hold ends by itself.

Which blocks are worth copying is the engine's word, whether anybody wants them the tier's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from antiphon.core.generation import Generation, KvReport
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from antiphon.engine.engine import Engine
from antiphon.obs.log import Logger

HOLD_S = 10.0  # the tier delivers by a deadline of its own; this is for one that broke its word

# A step whose tokens are mostly a prompt's says how fast prompts are computed; a short one does not.
_LEAST_PREFILL_TOKENS = 16
_LEAST_PREFILL_SHARE = 0.75

Command: TypeAlias = Callable[[Engine], None]
Post: TypeAlias = Callable[[Command], None]


class Delivery(Protocol):
    """What came for a generation: blocks from `Prefix.num_local` on, without a gap."""

    @property
    def generation(self) -> str: ...

    @property
    def blocks(self) -> Sequence[tuple[KvBlock, bytes | memoryview, Tier]]: ...

    @property
    def report(self) -> KvReport: ...


class KvTier(Protocol):
    """What the engine's thread needs of `kv.cache.KvCache`. No call waits for anything."""

    def begin(self, prefix: Prefix, deliver: Callable[[Delivery], None]) -> None:
        """Look for what the engine lacks; `deliver` is called once, here or from another thread."""
        ...

    def cancel(self, generation: str) -> None:
        """Nobody waits for this delivery any more."""
        ...

    def wants(self, block: KvBlock) -> bool:
        """Whether `keep` would add anything."""
        ...

    def keep(self, blocks: Sequence[tuple[KvBlock, bytes]]) -> None:
        """Take computed blocks."""
        ...

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Prompt tokens computed in so many seconds."""
        ...


class KvBridge:
    """One engine's link to a tier. `post` runs a command on the engine thread, from any thread."""

    def __init__(self, tier: KvTier, post: Post, log: Logger, *, hold_s: float = HOLD_S) -> None:
        self._tier: KvTier | None = tier  # None: it failed
        self._post = post
        self._log = log
        self._hold_s = hold_s
        self._num_steps = 0  # steps of the engine that were observed

    def add(self, engine: Engine, generation: Generation) -> None:
        """Hand a generation to the engine and look for its blocks. Raises what `Engine.add` raises."""
        tier = self._tier
        if tier is None:
            engine.add(generation)
            return
        prefix = engine.add(generation, self._hold_s)
        is_local = prefix.num_local == len(prefix.blocks)
        is_asking = bool(prefix.blocks) and (is_local or engine.is_held(generation.id))
        if is_asking and not self._try(lambda: tier.begin(prefix, self._deliver)):
            engine.release_hold(generation.id)

    def abort(self, engine: Engine, generation_id: str, choice: int | None) -> None:
        """End a generation, or one choice of it."""
        engine.abort(generation_id, choice)
        tier = self._tier
        if tier is not None and not engine.is_open(generation_id):
            self._try(lambda: tier.cancel(generation_id))

    def after_step(self, engine: Engine) -> None:
        """Give the tier what has become due. Call when the step's outputs are sent, and at the end."""
        tier = self._tier
        if tier is not None:
            self._try(lambda: self._observe(engine, tier))
            self._try(lambda: self._copy_out(engine, tier))

    def _observe(self, engine: Engine, tier: KvTier) -> None:
        step, num_steps = engine.last_step, engine.counters.steps
        is_new, self._num_steps = num_steps > self._num_steps, num_steps
        least = max(_LEAST_PREFILL_TOKENS, _LEAST_PREFILL_SHARE * step.num_tokens)
        if is_new and step.num_prefill_tokens >= least:
            tier.observe_prefill(step.num_prefill_tokens, step.seconds)

    def _copy_out(self, engine: Engine, tier: KvTier) -> None:
        wanted = [block for block in engine.exportable() if tier.wants(block)]
        if wanted:
            tier.keep(engine.export(wanted))

    def _deliver(self, delivery: Delivery) -> None:
        """On any thread."""
        self._post(lambda engine: self._supply(engine, delivery))

    def _supply(self, engine: Engine, delivery: Delivery) -> None:
        if not self._try(lambda: engine.supply(delivery.generation, delivery.blocks, delivery.report)):
            engine.release_hold(delivery.generation)

    def _try(self, call: Callable[[], None]) -> bool:
        """False if it raised: the tier is not asked again."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - answers go on without the tier; it is said once
            self._tier = None
            self._log.error("kv.failed", exc_info=error)
            return False
        return True
