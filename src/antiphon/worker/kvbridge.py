"""Between the engine and the KV tiers: what a waiting prompt gets from them, what they are given.

Called on the engine thread, so nothing here waits: the tier answers at once or posts its delivery to
the thread's inbox later. Outputs leave before blocks are copied out. Invariant: the tiers cost reuse at
worst, never an answer: a tier that raises is not asked again, and a hold ends by itself.

Which blocks are worth copying is the engine's word, whether anybody wants them the tier's. The end of a
generation that is there for its prompt's blocks only leaves when they are written: who hears of it looks
for them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from antiphon.core.blockhash import BlockHash
from antiphon.core.generation import Generation, KvReport, StepOutput, Terminal
from antiphon.core.kvblock import KvBlock, Prefix, Tier
from antiphon.engine.engine import Engine
from antiphon.obs.log import Logger
from antiphon.worker.rates import computing_s, is_prefill

HOLD_S = 10.0  # the tier delivers by a deadline of its own; this is for one that broke its word

Command: TypeAlias = Callable[[Engine], None]
Post: TypeAlias = Callable[[Command], None]
Emit: TypeAlias = Callable[[list[StepOutput]], None]


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

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop what is held of these tenants."""
        ...

    def when_written(self, call: Callable[[], None]) -> None:
        """Call this, here or on another thread, when others can find what was kept, or that has failed."""
        ...

    def take_lost(self) -> Collection[BlockHash]:
        """Blocks in use that were kept once and turned out to be gone since the last call."""
        ...

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Prompt tokens computed in so many seconds."""
        ...

    def observe_import(self, num_blocks: int, seconds: float) -> None:
        """Blocks that came from beyond the engine, and what it took it to begin with them."""
        ...


class KvBridge:
    """One engine's link to a tier. `post` runs a command on the engine thread, from any thread.

    `emit` sends outputs that `hold_back` kept; called on the engine thread.
    """

    def __init__(self, tier: KvTier, post: Post, emit: Emit, log: Logger, *, hold_s: float = HOLD_S) -> None:
        self._tier: KvTier | None = tier  # None: it failed
        self._post = post
        self._emit = emit
        self._log = log
        self._hold_s = hold_s
        self._num_steps = 0  # steps of the engine that were observed
        self._prefills: set[str] = set()  # open generations that are there for their prompt's blocks only
        self._ends: list[StepOutput] = []  # of theirs, in the last step
        self._kept_back: list[StepOutput] = []  # ends whose blocks are being written

    def add(self, engine: Engine, generation: Generation) -> None:
        """Hand a generation to the engine and look for its blocks. Raises what `Engine.add` raises."""
        tier = self._tier
        if tier is None:
            engine.add(generation)
            return
        prefix = engine.add(generation, self._hold_s)
        if generation.is_prefill_only:
            self._prefills.add(generation.id)
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

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop what the tier holds of these tenants."""
        tier = self._tier
        if tier is not None:
            self._try(lambda: tier.forget(tenants))

    def hold_back(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Those that may leave now. Call with all outputs of a step, before `after_step`."""
        if not self._prefills:
            return outputs
        leaving = []
        for output in outputs:
            if output.generation in self._prefills and output.finish is not None:
                self._prefills.discard(output.generation)
                if output.finish is Terminal.LENGTH:
                    self._ends.append(output)
                    continue
            leaving.append(output)
        return leaving

    def let_go(self) -> list[StepOutput]:
        """All outputs that are kept back, for the end."""
        outputs = self._kept_back + self._ends
        self._kept_back, self._ends = [], []
        return outputs

    def after_step(self, engine: Engine) -> None:
        """Give the tier what has become due. Call when the step's outputs are sent, and at the end."""
        tier = self._tier
        if tier is not None:
            self._try(lambda: self._observe(engine, tier))
            self._try(lambda: self._copy_out(engine, tier))
        if self._ends:
            ends, self._ends = self._ends, []
            self._kept_back += ends
            self._send_when_written(ends)

    def _send_when_written(self, ends: list[StepOutput]) -> None:
        def written() -> None:  # on any thread
            self._post(lambda engine: self._send(ends))

        tier = self._tier
        if tier is None or not self._try(lambda: tier.when_written(written)):
            self._send(ends)

    def _send(self, ends: list[StepOutput]) -> None:
        """Those of them that are still kept back."""
        ends = [output for output in ends if output in self._kept_back]
        self._kept_back = [output for output in self._kept_back if output not in ends]
        self._emit(ends)

    def _observe(self, engine: Engine, tier: KvTier) -> None:
        step, num_steps = engine.last_step, engine.counters.steps
        is_new, self._num_steps = num_steps > self._num_steps, num_steps
        if is_new and is_prefill(step):
            tier.observe_prefill(step.num_prefill_tokens, computing_s(step))
        if is_new and step.num_imported_blocks:
            tier.observe_import(step.num_imported_blocks, step.import_s)

    def _copy_out(self, engine: Engine, tier: KvTier) -> None:
        lost = tier.take_lost()
        if lost:
            engine.offer_anew(lost)
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
