"""Random life on two workers with KV tiers and one store: KV used is KV of exactly these tokens.

The scripted runner's tokens depend on the KV it was given, so whatever is fetched, lost, spoiled, late
or half there, an answer is that of an engine alone, or the test sees it. Real cache, codec and store;
between cache and engine stands a gatekeeper that decides when deliveries arrive and how much of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from antiphon.core.clock import VirtualClock, WallClock
from antiphon.core.generation import Generation, Sampling, StepOutput, Terminal
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings
from antiphon.kv.cache import KvCache, KvCacheSettings
from antiphon.kv.codec import BlockCodec
from antiphon.kv.gate import GateSettings, Rates
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.memorystore import MemoryStore
from antiphon.kv.store import BlockStore, Run
from antiphon.obs.log import configure_logging
from antiphon.worker.kvbridge import Command, KvBridge
from support.kvtier import Gatekeeper
from support.kvvalues import KEYS, NAMESPACE

BLOCK = 4
BLOCK_BYTES = 2 * 8 * BLOCK
RUNNER = ScriptedSettings(context_tokens=96, block_tokens=BLOCK, max_sequences=3)
HOLD_S = 1.0
ENDS_WELL = {Terminal.LENGTH, Terminal.STOP}
LOG = configure_logging(level="critical")


def quiet_answer(generation: Generation, choice: int) -> list[int]:
    """What an engine with nothing else to do and nobody to ask answers."""
    engine = Engine(
        ScriptedRunner(SCRIPTS["noise"], RUNNER),
        EngineSettings(num_blocks=200, token_budget=16),
        VirtualClock(),
    )
    engine.add(generation)
    found: list[int] = []
    while engine.has_work:
        for output in engine.step():
            if output.choice == choice:
                found += output.ids
    return found


@dataclass
class SharedStore:
    """The store of all workers: one that closes takes nothing from the others. Knows its keys."""

    inner: MemoryStore

    def __post_init__(self) -> None:
        self.keys: list[str] = []

    def get_run(self, keys: Sequence[str], timeout_s: float) -> Run:
        return self.inner.get_run(keys, timeout_s)

    def put(self, key: str, value: bytes, ttl_ms: int, timeout_s: float) -> bool:
        is_new = self.inner.put(key, value, ttl_ms, timeout_s)
        if key not in self.keys:
            self.keys.append(key)
        return is_new

    def touch(self, ttls_ms: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
        return self.inner.touch(ttls_ms, timeout_s)

    def delete(self, keys: Sequence[str], timeout_s: float) -> int:
        return self.inner.delete(keys, timeout_s)

    def ping(self, timeout_s: float) -> float:
        return self.inner.ping(timeout_s)

    def close(self) -> None:
        pass


class Worker:
    """An engine with its tiers, stepped by hand."""

    def __init__(self, store: BlockStore, clock: VirtualClock, host_bytes: int) -> None:
        cache_settings = KvCacheSettings(
            block_tokens=BLOCK,
            block_bytes=BLOCK_BYTES,
            host=HostSettings(budget_bytes=host_bytes),
            gate=GateSettings(patience_s=20.0),
            rates=Rates(prefill_tokens_per_s=1.0),
        )
        remote = (store, BlockCodec(NAMESPACE, KEYS))
        self.cache = KvCache(cache_settings, remote, WallClock(), lambda kind, detail: None)
        self.gate = Gatekeeper(self.cache)
        self.inbox: list[Command] = []
        emit: list[StepOutput] = []  # no generation here is for its prompt's blocks only
        self.bridge = KvBridge(self.gate, self.inbox.append, emit.extend, LOG, hold_s=HOLD_S)
        engine_settings = EngineSettings(
            num_blocks=30, namespace=NAMESPACE, checkpoint_blocks=2, token_budget=7, max_waiting=50
        )
        self.engine = Engine(ScriptedRunner(SCRIPTS["noise"], RUNNER), engine_settings, clock)

    def read(self) -> None:
        while self.inbox:
            self.inbox.pop(0)(self.engine)

    def step(self) -> list[StepOutput]:
        self.read()
        outputs = self.engine.step() if self.engine.has_work else []
        self.bridge.after_step(self.engine)
        return outputs

    def stop(self, finish: Terminal, *, is_orderly: bool) -> list[StepOutput]:
        """End as after a signal, or as after a crash: then what is not written yet is lost."""
        outputs = self.engine.end_all(finish)
        if is_orderly:
            self.bridge.after_step(self.engine)
            self.gate.write_all()
        self.cache.close()
        return outputs


@dataclass(frozen=True)
class Wish:
    """A prompt from one of few trunks, so that prompts share beginnings of any length.

    One trunk begins with tokens that the operator made public.
    """

    scope: bytes
    trunk: int
    length: int
    tail: tuple[int, ...]
    n: int
    max_tokens: int

    def generation(self, name: str) -> Generation:
        prompt = [*((self.trunk * 50 + i) % 256 for i in range(self.length)), *self.tail]
        return Generation(
            id=name,
            model="m",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            num_public_tokens=min(9, self.length) if self.trunk == 0 else 0,
            scope=self.scope,
            n=self.n,
            sampling=Sampling(seed=len(prompt), max_tokens=self.max_tokens, temperature=0.8, stop_ids=(257,)),
        )


WISHES = st.builds(
    Wish,
    scope=st.sampled_from([b"one", b"two"]),
    trunk=st.integers(0, 1),
    length=st.integers(1, 40),
    tail=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    n=st.integers(1, 2),
    max_tokens=st.integers(1, 30),
)


# Which of what there is then: not drawn from the things themselves, whose number depends on threads.
PICK = st.integers(0, 999)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _flipped(value: bytes, at: int) -> bytes:
    """The value with one bit changed: anywhere, or before the MAC, in what the next token is made of."""
    return value[:at] + bytes(byte ^ 4 for byte in value[at : at + 1]) + value[at + 1 :]


class KvMachine(RuleBasedStateMachine):
    """Two workers that come and go, two tenants, few prompts, a store that cannot be trusted."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.store = SharedStore(MemoryStore(WallClock(), 2**20))
        self.workers = [Worker(self.store, self.clock, 12_000), Worker(self.store, self.clock, 0)]
        self.generations: dict[str, Generation] = {}
        self.place: dict[str, int] = {}
        self.outputs: dict[tuple[str, int], list[StepOutput]] = defaultdict(list)
        self.quiet: dict[tuple[str, int], list[int]] = {}

    @initialize(wishes=st.lists(WISHES, min_size=1, max_size=4), at=st.integers(0, 1))
    def warm(self, wishes: list[Wish], at: int) -> None:
        """A worker that has answered, and a store that has its blocks."""
        self._answer(at, wishes)

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=4), at=st.integers(0, 1))
    def ask(self, wishes: list[Wish], at: int) -> None:
        """Some prompts at once, answered in peace."""
        self._answer(at, wishes)

    @rule(wish=WISHES, at=st.integers(0, 1), is_timely=st.booleans())
    def submit(self, wish: Wish, at: int, is_timely: bool) -> None:
        """One more prompt; its delivery comes at once, or when it is let through."""
        self._submit(at, wish.generation(f"g{len(self.generations)}"))
        if is_timely:
            self.workers[at].gate.let_all_through()

    @rule(pick=PICK, choice=st.sampled_from([None, 0, 1]))
    def abort(self, pick: int, choice: int | None) -> None:
        """Any generation, at any moment, one choice or all."""
        name = f"g{pick % len(self.generations)}"
        worker = self.workers[self.place[name]]
        worker.bridge.abort(worker.engine, name, choice)

    @rule(at=st.integers(0, 1), count=st.sampled_from([1, 5, 40]))
    def step(self, at: int, count: int) -> None:
        """Some steps of one worker."""
        for _ in range(count):
            self._record(self.workers[at].step())

    @rule(at=st.integers(0, 1), pick=PICK, cut=st.integers(0, 10), how=st.sampled_from(["part", "hole"]))
    def let_through(self, at: int, pick: int, cut: int, how: str) -> None:
        """One delivery arrives, whenever, in part (or whole), or with a block missing in the middle."""
        waiting = self.workers[at].gate.waiting
        if not waiting:
            return
        delivery, deliver = waiting.pop(pick % len(waiting))
        rest = delivery.blocks[cut + 1 :] if how == "hole" else []
        deliver(replace(delivery, blocks=delivery.blocks[:cut] + rest))
        self.workers[at].read()

    @rule(seconds=st.sampled_from([0.4, HOLD_S]))
    def wait(self, seconds: float) -> None:
        """Holds run out."""
        self.clock.advance(seconds)

    @rule(at=st.integers(0, 1))
    def write_all(self, at: int) -> None:
        """What was kept is in the tiers."""
        self.workers[at].gate.write_all()

    @rule(
        first=st.sampled_from([0, 0, 3, 9, 27]),
        instead=PICK,
        at=PICK,
        how=st.sampled_from(["flip", "forge", "forge", "cut", "grow", "swap", "gone"]),
    )
    def spoil(self, first: int, instead: int, at: int, how: str) -> None:
        """Values of the store, from one on, are changed, put under another's key, or evicted."""
        keys = self.store.keys
        for key in keys[first:]:
            other = keys[instead % len(keys)]
            value, swapped = (self.store.get_run([name], 1.0).values[0] for name in (key, other))
            if value and swapped:
                self._spoil(key, value, swapped, at % len(value), how)

    @rule(at=st.integers(0, 1), is_orderly=st.booleans())
    def restart(self, at: int, is_orderly: bool) -> None:
        """A worker ends; what it was answering is carried on by the other one."""
        lost = self.workers[at].stop(Terminal.LOST, is_orderly=is_orderly)
        self._record(lost)
        self.workers[at] = Worker(self.store, self.clock, 12_000 if at == 0 else 0)
        for end in lost:
            generation = self.generations[end.generation]
            if generation.n == 1 and end.position < generation.sampling.max_tokens:
                received = [i for output in self.outputs[end.generation, 0] for i in output.ids]
                tokens = generation.token_ids + received
                name = f"g{len(self.generations)}"
                self._submit(1 - at, msgspec.structs.replace(generation, id=name, token_ids=tokens))

    @invariant()
    def blocks_add_up(self) -> None:
        """free + cached + used = all, hashes and blocks agree, marks are on held blocks."""
        for worker in self.workers:
            worker.engine.check()

    def teardown(self) -> None:
        """Run dry: one end per choice, and every completed answer is that of the quiet run."""
        self.clock.advance(HOLD_S)
        for worker in self.workers:
            for _ in range(3000):
                if not worker.engine.has_work:
                    break
                self._record(worker.step())
            assert not worker.engine.has_work
            worker.engine.check()
            assert worker.stop(Terminal.ABORTED, is_orderly=True) == []
        for name, generation in self.generations.items():
            for choice in range(generation.n):
                self._check(name, choice)

    def _answer(self, at: int, wishes: list[Wish]) -> None:
        worker = self.workers[at]
        for wish in wishes:
            self._submit(at, wish.generation(f"g{len(self.generations)}"))
        worker.gate.let_all_through()
        for _ in range(150):
            self._record(worker.step())
        worker.gate.write_all()

    def _spoil(self, key: str, value: bytes, swapped: bytes, cut: int, how: str) -> None:
        changed = {
            "flip": _flipped(value, cut),
            "forge": _flipped(value, max(0, len(value) - 32 - 8) + cut % 8),
            "cut": value[:cut],
            "grow": value + value[:cut],
            "swap": swapped,
        }
        self.store.delete([key], 1.0)
        if how in changed:
            self.store.inner.put(key, changed[how], 10_000_000, 1.0)

    def _submit(self, at: int, generation: Generation) -> None:
        self.generations[generation.id] = generation
        self.place[generation.id] = at
        self.workers[at].bridge.add(self.workers[at].engine, generation)

    def _record(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.outputs[output.generation, output.choice].append(output)

    def _check(self, name: str, choice: int) -> None:
        generation, outputs = self.generations[name], self.outputs[name, choice]
        assert [o.finish is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
        found = [i for output in outputs for i in output.ids]
        expected = self._expected(name, choice)
        if outputs[-1].finish in ENDS_WELL:
            assert found == expected
        else:
            assert found == expected[: len(found)]
        cached = outputs[0].cached
        if cached is not None:
            others = [other for other in self.generations if other != name or generation.n > 1]
            assert cached.total <= max((self._num_shared(generation, other) for other in others), default=0)

    def _expected(self, name: str, choice: int) -> list[int]:
        """The quiet answer, computed once."""
        if (name, choice) not in self.quiet:
            self.quiet[name, choice] = quiet_answer(self.generations[name], choice)
        return self.quiet[name, choice]

    def _num_shared(self, generation: Generation, name: str) -> int:
        """Most tokens that KV of another generation, or a sibling choice, could save this one."""
        other = self.generations[name]
        publics = [g.num_public_tokens // BLOCK for g in (generation, other)]
        if other.scope == generation.scope and publics[0] == publics[1]:
            answers = (self._expected(name, choice) for choice in range(other.n))
            return max(num_common(generation.token_ids, other.token_ids + answer) for answer in answers)
        return min(num_common(generation.token_ids, other.token_ids), BLOCK * min(publics))


KvMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestKvMachine = KvMachine.TestCase
