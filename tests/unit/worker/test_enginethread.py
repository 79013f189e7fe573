"""The engine thread: refusals, death, health, stop. Time is a number handed in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from antiphon.core.clock import VirtualClock, WallClock
from antiphon.core.generation import Generation, StepOutput, Terminal
from antiphon.core.kvblock import Tier
from antiphon.engine.blocks import BlockManager
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import Chunk
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings
from antiphon.kv.events import Directory
from antiphon.obs.log import configure_logging
from antiphon.worker import enginethread
from antiphon.worker.enginethread import EngineThread, StepNews
from support.kvtier import PuppetTier

Make = Callable[..., Generation]


def build(wait: Callable[[float], None] = lambda seconds: None, **settings: object) -> Callable[[], Engine]:
    runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(**settings), wait)
    return lambda: Engine(runner, EngineSettings(num_blocks=200), VirtualClock())


class Heard:
    """Collects news; `ended(name)` waits for a generation's end."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self._changed = asyncio.Event()

    def take(self, news: StepNews) -> None:
        self.outputs += news.outputs
        self._changed.set()

    async def something(self) -> None:
        async with asyncio.timeout(5):
            await self._changed.wait()

    async def ended(self, name: str) -> StepOutput:
        async with asyncio.timeout(5):
            while True:
                for output in self.outputs:
                    if output.generation == name and output.finish is not None:
                        return output
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def thread(clock: VirtualClock) -> EngineThread:
    return EngineThread(clock, configure_logging(level="critical"), step_limit_s=10.0)


async def test_what_is_submitted_ends(thread: EngineThread, make_generation: Make) -> None:
    """Outputs arrive on the loop, in order, the last with the end."""
    heard = Heard()
    await thread.start(build(), heard.take)
    thread.submit(make_generation("a", [1, 2]))
    assert (await heard.ended("a")).finish is Terminal.LENGTH
    assert [o.position for o in heard.outputs] == list(range(8))
    await thread.stop()
    assert not thread.is_healthy


async def test_a_model_that_does_not_load_is_the_callers_error(thread: EngineThread) -> None:
    """`start` raises what the build raised; the thread is unhealthy, not hanging."""

    def broken() -> Engine:
        raise ValueError("no such weights")

    with pytest.raises(ValueError, match="no such weights"):
        await thread.start(broken, lambda news: None)
    assert not thread.is_healthy


async def test_a_dying_engine_ends_all_answers(thread: EngineThread, make_generation: Make) -> None:
    """Whatever kills the thread, each answer gets its end and health says so at once."""
    heard = Heard()
    await thread.start(build(die_after=3), heard.take)
    thread.submit(make_generation("a", [1], n=2))
    assert (await heard.ended("a")).finish is Terminal.LOST
    assert {o.choice for o in heard.outputs if o.finish is Terminal.LOST} == {0, 1}
    assert isinstance(thread.failure, MemoryError)
    assert not thread.is_healthy


async def test_a_step_that_hangs_is_unhealthy(
    thread: EngineThread, clock: VirtualClock, make_generation: Make
) -> None:
    """Alive is not enough: without progress for the limit the worker counts as broken."""
    in_step, go_on = threading.Event(), threading.Event()

    def hang(seconds: float) -> None:
        in_step.set()
        go_on.wait(5)

    heard = Heard()
    await thread.start(build(hang, step_s=one_second), heard.take)
    thread.submit(make_generation("a", [1], max_tokens=1))
    await asyncio.to_thread(in_step.wait, 5)
    assert thread.is_healthy
    clock.advance(11.0)
    assert not thread.is_healthy
    go_on.set()
    await heard.ended("a")
    await thread.stop()


def one_second(chunks: list[Chunk]) -> float:
    return 1.0


async def test_a_refusal_is_an_output(thread: EngineThread, make_generation: Make) -> None:
    """Every choice of what cannot run is ended with code and reason."""
    heard = Heard()
    await thread.start(build(), heard.take)
    thread.submit(make_generation("a", [], n=2))
    refused = await heard.ended("a")
    assert refused.finish is Terminal.REFUSED
    assert refused.error == "invalid_value: The prompt has no tokens."
    await thread.stop()


async def test_stop_ends_what_runs(thread: EngineThread, make_generation: Make) -> None:
    """A stop in mid-answer gives the answer back: it may go on elsewhere."""
    heard = Heard()
    await thread.start(build(lambda s: threading.Event().wait(0.005), step_s=one_second), heard.take)
    thread.submit(make_generation("a", [1], max_tokens=5000))
    await heard.something()
    await thread.stop()
    assert (await heard.ended("a")).finish is Terminal.LOST


async def test_what_runs_can_be_given_back(thread: EngineThread, make_generation: Make) -> None:
    """Each choice ends as lost, after the tokens it had, and the thread lives on."""
    heard = Heard()
    await thread.start(build(lambda s: threading.Event().wait(0.002), step_s=one_second), heard.take)
    thread.submit(make_generation("a", [1], max_tokens=5000, n=2))
    await heard.something()
    thread.give_back()
    last = await heard.ended("a")
    assert (last.finish, last.error) == (Terminal.LOST, "The worker stops.")
    thread.submit(make_generation("b", [2]))
    assert (await heard.ended("b")).finish is Terminal.LENGTH
    await thread.stop()


async def test_after_some_steps_one_that_hangs_is_noticed_sooner(
    clock: VirtualClock, make_generation: Make
) -> None:
    """The limit is many times the longest step so far, but not shorter than a prompt's step may take."""
    thread = EngineThread(clock, configure_logging(level="critical"))
    in_step, go_on = threading.Event(), threading.Event()
    num_steps = 0

    def step(seconds: float) -> None:
        nonlocal num_steps
        num_steps += 1
        clock.advance(seconds)
        if num_steps == 12:
            in_step.set()
            go_on.wait(5)

    heard = Heard()
    await thread.start(build(step, step_s=lambda chunks: 4.0), heard.take)
    thread.submit(make_generation("a", [1], max_tokens=12))
    await asyncio.to_thread(in_step.wait, 5)
    clock.advance(30.0)
    assert thread.is_healthy
    clock.advance(10.0)
    assert not thread.is_healthy
    go_on.set()
    await heard.ended("a")
    await thread.stop()


PROMPT = [i % 200 for i in range(70)]  # four full blocks and some


def build_for_tiers() -> Engine:
    runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(context_tokens=4096))
    return Engine(runner, EngineSettings(num_blocks=300, checkpoint_blocks=2), WallClock())


@pytest.fixture
def timely(monkeypatch: pytest.MonkeyPatch) -> EngineThread:
    """A thread on the wall clock that looks around by itself far too seldom for any test."""
    monkeypatch.setattr(enginethread, "_IDLE_WAIT_S", 1000.0)
    return EngineThread(WallClock(), configure_logging(level="critical"))


async def test_a_delivery_wakes_the_thread(timely: EngineThread, make_generation: Make) -> None:
    """From whatever thread it comes; until then the thread sleeps."""
    heard, tier = Heard(), PuppetTier()
    await timely.start(build_for_tiers, heard.take)
    timely.attach(tier)
    timely.submit(make_generation("g", PROMPT))
    await timely.held_hashes()
    assert heard.outputs == []
    await asyncio.to_thread(tier.deliver, "g")
    assert (await heard.ended("g")).finish is Terminal.LENGTH
    await timely.stop()


async def test_a_held_answer_ends_in_time(timely: EngineThread, make_generation: Make) -> None:
    """The thread wakes for a deadline though nothing comes and nothing runs."""
    heard = Heard()
    await timely.start(build_for_tiers, heard.take)
    timely.attach(PuppetTier())
    timely.submit(make_generation("g", PROMPT, timeout_s=0.05))
    assert (await heard.ended("g")).finish is Terminal.DEADLINE
    await timely.stop()


async def test_outputs_leave_before_blocks_are_copied(timely: EngineThread, make_generation: Make) -> None:
    """A tier that takes its time holds up the next step, never the token that is there."""
    heard = Heard()
    has_spoken = threading.Event()
    waits: list[bool] = []
    tier = PuppetTier(on_keep=lambda: waits.append(has_spoken.wait(5)))
    await timely.start(build_for_tiers, heard.take)
    timely.attach(tier)
    timely.submit(make_generation("g", PROMPT))
    await timely.held_hashes()
    tier.deliver("g")
    await heard.something()
    has_spoken.set()
    await heard.ended("g")
    await timely.stop()
    assert waits
    assert all(waits)


@pytest.mark.parametrize("is_written", [True, False])
async def test_the_end_of_a_prefill_leaves_once(
    timely: EngineThread, make_generation: Make, is_written: bool
) -> None:
    """When its blocks are written, told from another thread; or, unwritten, when the worker stops."""
    heard, tier, is_kept = Heard(), PuppetTier(is_writing=True), threading.Event()
    tier.on_keep = is_kept.set
    await timely.start(build_for_tiers, heard.take)
    timely.attach(tier)
    timely.submit(msgspec.structs.replace(make_generation("g~p", PROMPT), is_prefill_only=True))
    await timely.held_hashes()
    tier.deliver("g~p")
    assert await asyncio.to_thread(is_kept.wait, 5)
    await timely.held_hashes()  # its step is over, to the last command
    assert heard.outputs == []
    if is_written:
        await asyncio.to_thread(tier.written)
        await heard.ended("g~p")
    await timely.stop()
    await heard.ended("g~p")
    assert [(output.finish, output.ids) for output in heard.outputs] == [(Terminal.LENGTH, [])]


async def test_stopping_saves_what_was_computed(timely: EngineThread, make_generation: Make) -> None:
    """The blocks of an answer that is cut off are kept, so that it can be carried on elsewhere."""
    heard, tier = Heard(), PuppetTier()
    await timely.start(build_for_tiers, heard.take)
    timely.attach(tier)
    timely.submit(make_generation("g", PROMPT, max_tokens=4000))
    await timely.held_hashes()
    tier.deliver("g")
    await heard.something()
    await timely.stop()
    end = await heard.ended("g")
    assert end.finish is Terminal.LOST
    num_full = (len(PROMPT) + end.position - 1) // 16
    assert [block.index for block, _ in tier.kept] == list(range(num_full))


class Told:
    """A directory whose changes can be waited for."""

    def __init__(self) -> None:
        self.directory = Directory()
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.directory.listen(lambda: loop.call_soon_threadsafe(self._changed.set))

    async def until(self, is_met: Callable[[frozenset[bytes]], bool]) -> frozenset[bytes]:
        """The hashes in the engine, as soon as this is true of them."""
        async with asyncio.timeout(5):
            while not is_met(held := self.directory.snapshot().hashes[Tier.ENGINE]):
                self._changed.clear()
                await self._changed.wait()
        return held


async def test_blocks_of_the_engine_are_noted_without_any_tiers(
    thread: EngineThread, make_generation: Make
) -> None:
    """Full blocks when they are computed; what must make room goes from the directory as well."""
    heard, told = Heard(), Told()
    runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(), lambda seconds: None)
    size = runner.block_tokens
    await thread.start(lambda: Engine(runner, EngineSettings(num_blocks=4), VirtualClock()), heard.take)
    thread.report_to(told.directory)
    thread.submit(make_generation("a", list(range(3 * size)), max_tokens=1))
    first = await told.until(lambda held: len(held) == 3)
    assert first == set(await thread.held_hashes())
    thread.submit(make_generation("b", [7] * 3 * size, max_tokens=1))
    await heard.ended("b")
    now = await told.until(lambda held: len(held - first) == 3)
    assert now == set(await thread.held_hashes())
    assert not first <= now
    await thread.stop()


async def test_more_changes_than_are_remembered_are_made_good(
    thread: EngineThread, make_generation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block manager lost count: the directory is told what is held, and goes on."""
    monkeypatch.setattr(BlockManager.__init__, "__defaults__", (2,))
    heard, told = Heard(), Told()
    await thread.start(build(), heard.take)
    thread.report_to(told.directory)
    thread.submit(make_generation("a", list(range(200)), max_tokens=1))
    held = await told.until(lambda held: len(held) > 2)
    assert held == set(await thread.held_hashes())
    await thread.stop()
