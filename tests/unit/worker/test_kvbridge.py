"""The bridge between engine and KV tiers, on one thread: an inbox is run between steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import msgspec
import pytest

from antiphon.core.clock import Clock, VirtualClock, WallClock
from antiphon.core.generation import CachedTokens, Generation, KvReport, StepOutput, Terminal
from antiphon.core.kvblock import Tier
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings
from antiphon.kv.cache import KvCache, KvCacheSettings
from antiphon.kv.codec import BlockCodec
from antiphon.kv.gate import GateSettings, Rates
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.memorystore import MemoryStore
from antiphon.obs.log import configure_logging
from antiphon.worker.kvbridge import Command, KvBridge, KvTier
from support.kvtier import Arrivals, Parcel, PuppetTier
from support.kvvalues import KEYS, NAMESPACE

Make = Callable[..., Generation]
PROMPT = [i % 200 for i in range(70)]  # four full blocks of 16 and some
BLOCK_BYTES = 256


class Bench:
    """An engine, a bridge, and the inbox between them."""

    def __init__(self, tier: KvTier, clock: Clock | None = None) -> None:
        runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(context_tokens=256, max_sequences=4))
        settings = EngineSettings(num_blocks=100, namespace=NAMESPACE, checkpoint_blocks=2, token_budget=64)
        self.engine = Engine(runner, settings, clock or VirtualClock())
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        log = configure_logging(level="critical")
        self.emitted: list[StepOutput] = []  # what was kept back and then sent
        self.bridge = KvBridge(tier, self.inbox.put, self.emitted.extend, log, hold_s=1.0)

    def add(self, generation: Generation) -> None:
        self.bridge.add(self.engine, generation)

    def read(self) -> None:
        """Run what was posted."""
        while not self.inbox.empty():
            self.inbox.get()(self.engine)

    def await_post(self) -> None:
        """Wait for a kv thread to post something, and run it."""
        self.inbox.get(timeout=20.0)(self.engine)

    def run(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        self.read()
        while self.engine.has_work:
            outputs += self.bridge.hold_back(self.engine.step())
            self.bridge.after_step(self.engine)
            self.read()
        self.engine.check()
        return outputs


def ids(outputs: list[StepOutput]) -> list[int]:
    return [i for output in outputs for i in output.ids]


@pytest.fixture
def saved(make_generation: Make) -> Arrivals:
    """PROMPT's blocks as another worker's tier was given them."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("x", PROMPT, max_tokens=1))
    tier.deliver("x")
    bench.run()
    return [(block, payload, Tier.STORE) for block, payload in tier.kept]


def cache_over(store: MemoryStore | None, host_bytes: int = 0) -> KvCache:
    settings = KvCacheSettings(
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        host=HostSettings(budget_bytes=host_bytes),
        gate=GateSettings(patience_s=20.0),
        rates=Rates(prefill_tokens_per_s=10.0),
    )
    remote = None if store is None else (store, BlockCodec(NAMESPACE, KEYS))
    return KvCache(settings, remote, WallClock(), lambda kind, detail: None)


def test_a_prompt_gets_what_the_tier_delivers(make_generation: Make, saved: Arrivals) -> None:
    """It waits for that, and computes the rest."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT))
    assert bench.run() == []
    prefix, _ = tier.begun["g"]
    assert [block for block, _, _ in saved] == list(prefix.blocks)
    tier.deliver("g", saved)
    outputs = bench.run()
    assert outputs[0].cached == CachedTokens(store=64)
    assert outputs[0].kv == KvReport(num_store=4, decision="fetched")
    assert [block.index for block, _ in tier.kept] == [], "what came is not sent back"


def test_without_an_answer_the_prompt_is_computed(make_generation: Make) -> None:
    """A tier that broke its word costs the hold, nothing else."""
    clock, tier = VirtualClock(), PuppetTier()
    bench = Bench(tier, clock)
    bench.add(make_generation("g", PROMPT))
    clock.advance(1.0)
    outputs = bench.run()
    assert outputs[0].kv == KvReport(num_computed=4, decision="late")
    tier.deliver("g")
    bench.run()


def test_only_prompts_that_something_is_missing_of_are_looked_for(make_generation: Make) -> None:
    """Not one without a full block, nor one whose blocks another one is waiting for; all here is told too."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("short", [1, 2, 3]))
    bench.add(make_generation("leader", PROMPT))
    bench.add(make_generation("follower", PROMPT))
    assert list(tier.begun) == ["leader"]
    tier.deliver("leader")
    bench.run()
    bench.add(make_generation("again", PROMPT))
    prefix, _ = tier.begun["again"]
    assert prefix.num_local == len(prefix.blocks) == 4
    assert {o.generation: o.kv for o in bench.run() if o.kv} == {"again": KvReport(num_local=4)}


def test_what_is_computed_is_kept_if_it_is_wanted(make_generation: Make) -> None:
    """Prompt and answer, in order; what the tier has already is not even copied."""
    tier = PuppetTier(unwanted={1, 2})
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT, max_tokens=60))
    tier.deliver("g")
    bench.run()
    assert [block.index for block, _ in tier.kept] == [0, 3, 4, 5, 6, 7]
    assert {len(payload) for _, payload in tier.kept} == {BLOCK_BYTES}
    assert bench.engine.counters.exported_blocks == 6


def test_a_fetch_is_cancelled_when_nobody_waits(make_generation: Make) -> None:
    """After the last choice, not after the first; what comes all the same is dropped."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT, n=2))
    bench.bridge.abort(bench.engine, "g", 0)
    assert tier.cancelled == []
    bench.bridge.abort(bench.engine, "g", 1)
    assert tier.cancelled == ["g"]
    tier.deliver("g")
    assert [output.finish for output in bench.run()] == [Terminal.ABORTED] * 2


def test_steps_of_prompts_tell_how_fast_they_are(make_generation: Make) -> None:
    """Each once; steps of answers, and the short end of a prompt, say nothing of that."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT, max_tokens=5))
    tier.deliver("g")
    bench.run()
    bench.bridge.after_step(bench.engine)
    assert [num_tokens for num_tokens, _ in tier.prefills] == [64]


def test_what_was_brought_tells_what_it_cost(make_generation: Make, saved: Arrivals) -> None:
    """Once for each generation that got blocks; one that found them in the engine says nothing."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT, max_tokens=5))
    tier.deliver("g", saved)
    bench.run()
    bench.add(make_generation("again", PROMPT, max_tokens=5))
    bench.run()
    assert tier.imports == [(4, 0.0)]


def test_what_the_tier_lost_is_kept_again_when_it_is_in_use(make_generation: Make) -> None:
    """Told between two turns, or in the middle of the second: its end brings the blocks."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT, max_tokens=1))
    tier.deliver("g")
    bench.run()
    first, tier.kept = tier.kept, []
    tier.lost = [block.hash for block, _ in first]
    bench.add(make_generation("again", PROMPT, max_tokens=3))
    bench.run()
    assert tier.kept == first


@pytest.mark.parametrize(
    "method", ["begin", "cancel", "wants", "keep", "take_lost", "observe_prefill", "observe_import"]
)
def test_a_tier_that_fails_is_left_alone(make_generation: Make, saved: Arrivals, method: str) -> None:
    """Whatever raises, answers are those of an engine alone, and it is never asked again."""
    tier = PuppetTier(broken=method)
    bench = Bench(tier)
    bench.add(make_generation("aborted", PROMPT))
    bench.bridge.abort(bench.engine, "aborted", None)
    bench.add(make_generation("g", PROMPT))
    if "g" in tier.begun:
        tier.deliver("g", saved if method == "observe_import" else None)
    outputs = [output for output in bench.run() if output.generation == "g"]
    assert outputs[-1].finish is Terminal.LENGTH
    num_calls = tier.num_calls
    bench.add(make_generation("later", [7, *PROMPT]))
    assert ids([o for o in bench.run() if o.generation == "later"])
    assert tier.num_calls == num_calls


def test_a_delivery_that_makes_no_sense_is_a_miss(make_generation: Make) -> None:
    """The engine goes on, and the generation with it."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.add(make_generation("g", PROMPT))
    _, deliver = tier.begun["g"]
    deliver(Parcel("g", [("no", "block")]))
    outputs = bench.run()
    assert outputs[-1].finish is Terminal.LENGTH
    assert outputs[0].kv == KvReport(num_computed=4, decision="fault")


def prefill_only(generation: Generation) -> Generation:
    return msgspec.structs.replace(generation, is_prefill_only=True)


def test_the_end_of_a_prefill_waits_until_its_blocks_are_written(make_generation: Make) -> None:
    """Who hears of it looks for them at once. Answers beside it leave as ever."""
    tier = PuppetTier(is_writing=True)
    bench = Bench(tier)
    bench.add(prefill_only(make_generation("g~p", PROMPT)))
    bench.add(make_generation("beside", [1, 2]))
    tier.deliver("g~p")
    outputs = bench.run()
    assert {output.generation for output in outputs} == {"beside"}
    assert [block.index for block, _ in tier.kept] == [0, 1, 2, 3]
    assert bench.emitted == []
    tier.written()
    bench.read()
    assert [(o.generation, o.ids, o.finish) for o in bench.emitted] == [("g~p", [], Terminal.LENGTH)]
    assert bench.bridge.let_go() == []


def test_an_aborted_prefill_does_not_wait(make_generation: Make) -> None:
    """Nobody looks for its blocks."""
    tier = PuppetTier(is_writing=True)
    bench = Bench(tier)
    bench.add(prefill_only(make_generation("g~p", PROMPT)))
    bench.bridge.abort(bench.engine, "g~p", None)
    assert [output.finish for output in bench.run()] == [Terminal.ABORTED]


def test_what_is_kept_back_leaves_at_the_end_and_once(make_generation: Make) -> None:
    """A worker that stops does not wait for its store; what the store says then is old news."""
    tier = PuppetTier(is_writing=True)
    bench = Bench(tier)
    bench.add(prefill_only(make_generation("g~p", PROMPT)))
    tier.deliver("g~p")
    assert bench.run() == []
    assert [output.finish for output in bench.bridge.let_go()] == [Terminal.LENGTH]
    tier.written()
    bench.read()
    assert bench.emitted == []


@pytest.mark.parametrize("method", ["keep", "when_written"])
def test_a_prefill_ends_though_the_tier_fails(make_generation: Make, method: str) -> None:
    """Its blocks are nowhere, whoever goes on computes them."""
    tier = PuppetTier(broken=method)
    bench = Bench(tier)
    bench.add(prefill_only(make_generation("g~p", PROMPT)))
    tier.deliver("g~p")
    assert bench.run() == []
    assert [output.finish for output in bench.emitted] == [Terminal.LENGTH]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A store that outlives workers."""
    yield MemoryStore(WallClock(), 2**20)


def test_another_worker_goes_on_from_the_store(make_generation: Make, store: MemoryStore) -> None:
    """The real tiers: a conversation begun at one worker needs only its new tokens computed at another."""
    first = Bench(cache := cache_over(store))
    first.add(make_generation("one", PROMPT, max_tokens=30))
    first.await_post()
    answer = ids(first.run())
    assert cache.drain(20.0)
    second = Bench(other := cache_over(store))
    turn = [*PROMPT, *answer, 9, 9, 9]
    second.add(make_generation("two", turn))
    second.await_post()
    outputs = second.run()
    alone = Bench(PuppetTier(broken="begin"))
    alone.add(make_generation("two", turn))
    assert ids(outputs) == ids(alone.run())
    assert outputs[0].cached == CachedTokens(store=96)
    assert outputs[0].kv is not None
    assert (outputs[0].kv.num_store, outputs[0].kv.decision) == (6, "fetched")
    assert second.engine.counters.prefill_tokens == len(turn) - 96
    for opened in (cache, other):
        opened.close()


def test_a_prefill_here_is_an_answer_there(make_generation: Make, store: MemoryStore) -> None:
    """When its end is told the blocks are in the store: the other worker computes the tail and no more."""
    prefill = Bench(cache := cache_over(store))
    prefill.add(prefill_only(make_generation("g~p", PROMPT)))
    prefill.await_post()
    assert prefill.run() == []
    while not prefill.emitted:
        prefill.await_post()
    decode = Bench(other := cache_over(store))
    decode.add(make_generation("g", PROMPT))
    decode.await_post()
    outputs = decode.run()
    assert outputs[0].cached == CachedTokens(store=64)
    assert decode.engine.counters.prefill_tokens == len(PROMPT) - 64
    for opened in (cache, other):
        opened.close()


def test_the_host_tier_answers_at_once(make_generation: Make) -> None:
    """No thread, no wait: blocks the engine lost come back before its next step."""
    cache = cache_over(None, host_bytes=2**20)
    first, second = Bench(cache), Bench(cache)
    first.add(make_generation("one", PROMPT))
    first.run()
    second.add(make_generation("two", PROMPT))
    outputs = second.run()
    assert outputs[0].cached == CachedTokens(host=64)
    assert outputs[0].kv is not None
    assert (outputs[0].kv.num_host, outputs[0].kv.decision) == (4, "none")
    cache.close()


def test_the_tier_is_told_whom_to_forget(make_generation: Make) -> None:
    """And one that fails at it costs no answer."""
    tier = PuppetTier()
    bench = Bench(tier)
    bench.bridge.forget({b"tenant:local"})
    assert tier.forgotten == [b"tenant:local"]
    tier.broken = "forget"
    bench.bridge.forget({b"tenant:local"})
    bench.add(make_generation("g", PROMPT))
    assert bench.run()[-1].finish is Terminal.LENGTH
