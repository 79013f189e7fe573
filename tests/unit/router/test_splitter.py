"""Prompts computed on one worker and answered on another: real links, workers that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from antiphon.core.errors import Quarantined
from antiphon.core.generation import Generation, Load, Role, Sampling, StepOutput, Terminal, WorkerRates
from antiphon.router import splitter
from antiphon.router.answer import Answer, Reader
from antiphon.router.dispatch import Dispatcher
from support.lines import Lines
from support.loopback import IDLE, SECRET, LoopbackWorker, Script, Session, saying, silent, worker_info

RATES = WorkerRates(500.0, 0.02, 0.0005, 2000.0, 0.0002)
LONG, SHORT = 2000, 20


def make_generation(num_tokens: int = LONG, name: str = "g", **fields: object) -> Generation:
    values: dict[str, object] = {
        "token_ids": [7] * num_tokens,
        "num_prompt_tokens": num_tokens,
        "sampling": Sampling(seed=1, max_tokens=16),
    }
    return Generation(id=name, model="scripted", **(values | fields))


def with_rates(load: Load = IDLE, rates: WorkerRates = RATES, running: int = 0) -> Load:
    return Load(load.step, running, 0, 0, 8, 0, 0, rates=rates)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that says nothing when it happens."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


class Worker(LoopbackWorker):
    """A loopback worker of a role that reports rates."""

    def __init__(self, script: Script, role: Role, rates: WorkerRates = RATES, running: int = 0) -> None:
        super().__init__(script, worker_info(role=role, worker=role.value))
        self.load = with_rates(rates=rates, running=running)

    async def _beat(self, session: Session) -> None:
        session.load = self.load
        await super()._beat(session)


async def computing(session: Session, generation: Generation) -> None:
    """A prefill worker that is done at once."""
    assert generation.is_prefill_only
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.LENGTH))


@contextlib.asynccontextmanager
async def dispatcher(*workers: Worker) -> AsyncIterator[Dispatcher]:
    """A dispatcher whose workers have reported."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.running())
        lines = Lines()
        made = Dispatcher([worker.url for worker in workers], SECRET, lines.logger(), draw=lambda: 0.0)
        task = asyncio.create_task(made.run())
        try:
            await lines.until("link.up", len(workers))
            await until(lambda: all(link.load.rates.step_s for link in made.fleet.links))
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])


async def text_of(answer: Answer) -> tuple[bytes, list[Terminal]]:
    """All that a client would be told, and the ends."""
    reader = Reader([answer], idle_s=60)
    ends: list[Terminal] = []
    async with asyncio.timeout(10):
        while (events := await reader.read()) is not None:
            ends += [event.finish for _, event in events if event.finish is not None]
    reader.close()
    return bytes(answer.received[0].tolist()), ends


async def test_a_long_prompt_goes_by_way_of_the_prefill_worker() -> None:
    """It gets the prompt, for its KV; the decode worker gets the request as it came; the route says so."""
    prefill, decode = Worker(computing, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        answer = made.start(make_generation(n=2))
        assert await text_of(answer) == (b"hi", [Terminal.STOP] * 2)
        errand, request = prefill.submits.get_nowait(), decode.submits.get_nowait()
    assert (errand.id, errand.is_prefill_only, errand.n) == ("g~p", True, 1)
    assert errand.token_ids == [7] * LONG
    assert (request.id, request.is_prefill_only, request.n) == ("g", False, 2)
    assert answer.route.startswith("decode split ")
    assert " by prefill; whole " in answer.route
    assert answer.num_moves == 0


async def test_the_answer_waits_for_its_prompt() -> None:
    """The decode worker hears nothing before."""
    done = asyncio.Event()

    async def slow(session: Session, generation: Generation) -> None:
        await done.wait()
        await computing(session, generation)

    prefill, decode = Worker(slow, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        answer = made.start(make_generation())
        await asyncio.wait_for(prefill.submits.get(), 10)
        assert decode.submits.empty()
        assert made.num_split == 1
        done.set()
        assert await text_of(answer) == (b"hi", [Terminal.STOP])
        assert made.num_split == 0


async def test_short_prompts_go_to_the_decode_worker() -> None:
    """The prefill worker takes no answers while there is somebody else."""
    prefill, decode = Worker(computing, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        assert await text_of(made.start(make_generation(SHORT))) == (b"hi", [Terminal.STOP])
        assert prefill.submits.empty()


async def test_a_prefill_worker_alone_answers() -> None:
    """Better than nobody."""
    async with dispatcher(Worker(saying("hi"), Role.PREFILL)) as made:
        assert await text_of(made.start(make_generation())) == (b"hi", [Terminal.STOP])


async def test_without_a_store_one_worker_does_it_all() -> None:
    """Workers whose store is away say rates of 0: then the one that is idle, whatever it is for."""
    away = WorkerRates(500.0, 0.02)
    prefill = Worker(saying("hi"), Role.PREFILL, away)
    decode = Worker(saying("no"), Role.DECODE, away, running=4)
    async with dispatcher(prefill, decode) as made:
        assert await text_of(made.start(make_generation())) == (b"hi", [Terminal.STOP])
        assert not prefill.submits.get_nowait().is_prefill_only
        assert decode.submits.empty()


async def dying(session: Session, generation: Generation) -> None:
    """Lost with the prompt half computed."""
    await session.close()


async def draining(session: Session, generation: Generation) -> None:
    """Turned away: it is about to stop."""
    refusal = "no_replica: The worker is about to stop."
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error=refusal))


async def failing(session: Session, generation: Generation) -> None:
    """The step failed."""
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.ERROR, error="planted"))


async def refusing(session: Session, generation: Generation) -> None:
    """Full, or too small for this prompt."""
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error="busy: full"))


@pytest.mark.parametrize("script", [dying, draining, failing, refusing])
async def test_whatever_becomes_of_the_prefill_worker_the_answer_goes_on(script: Script) -> None:
    """At once, at one worker, and the client sees no error."""
    prefill, decode = Worker(script, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        answer = made.start(make_generation())
        assert await text_of(answer) == (b"hi", [Terminal.STOP])
        assert prefill.submits.qsize() == 1
        assert not decode.submits.get_nowait().is_prefill_only


async def test_a_prompt_that_kills_its_prefill_worker_is_suspected() -> None:
    """Whoever answers it dies too: then it is known to be the cause, as if both had answered."""
    workers = [Worker(dying, Role.PREFILL), Worker(dying, Role.DECODE, running=4)]
    async with dispatcher(*workers, Worker(saying("hi"), Role.DECODE, running=8)) as made:
        answer = made.start(make_generation())
        assert await text_of(answer) == (b"", [Terminal.REFUSED])
        with pytest.raises(Quarantined):
            made.start(make_generation(name="again"))


async def test_a_prompt_that_takes_too_long_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errand is taken back, the answer is made from what is in the store by then."""
    monkeypatch.setattr(splitter, "LATE_FACTOR", 0.0)
    monkeypatch.setattr(splitter, "LATE_S", -3.9)  # the prompt is expected to take 4 s
    prefill, decode = Worker(silent, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        assert await text_of(made.start(make_generation())) == (b"hi", [Terminal.STOP])
        assert (await asyncio.wait_for(prefill.aborts.get(), 10)).generation == "g~p"


async def test_a_client_that_leaves_takes_the_errand_with_it() -> None:
    """The prefill worker is told; the decode worker never hears of it."""
    prefill, decode = Worker(silent, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        answer = made.start(make_generation())
        await asyncio.wait_for(prefill.submits.get(), 10)
        answer.abort()
        assert (await asyncio.wait_for(prefill.aborts.get(), 10)).generation == "g~p"
        assert await text_of(answer) == (b"", [Terminal.ABORTED])
        assert made.num_split == 0
        assert decode.submits.empty()


async def test_one_choice_that_ends_is_not_the_end() -> None:
    """The others still need the prompt."""
    prefill, decode = Worker(silent, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        answer = made.start(make_generation(n=2))
        await asyncio.wait_for(prefill.submits.get(), 10)
        answer.abort(0)
        assert made.num_split == 1
        answer.abort()
        assert made.num_split == 0


async def test_the_decode_worker_may_be_lost_meanwhile() -> None:
    """Then whoever is there answers, the prefill worker if need be."""

    async def script(session: Session, generation: Generation) -> None:
        if generation.is_prefill_only:
            for lost in decode.sessions:
                await lost.close()
            decode.protocol = 0  # it does not come back
            await until(lambda: len(made.fleet.serving("scripted")) == 1)
            await computing(session, generation)
        else:
            await saying("hi")(session, generation)

    prefill, decode = Worker(script, Role.PREFILL), Worker(saying("no"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        assert await text_of(made.start(make_generation())) == (b"hi", [Terminal.STOP])


async def test_a_gateway_that_stops_leaves_nothing_behind() -> None:
    """Answers that wait for their prompt end with it."""
    prefill, decode = Worker(silent, Role.PREFILL), Worker(saying("hi"), Role.DECODE, running=4)
    async with dispatcher(prefill, decode) as made:
        answer = made.start(make_generation())
        await asyncio.wait_for(prefill.submits.get(), 10)
    assert await text_of(answer) == (b"", [Terminal.LOST])
    assert made.num_split == 0
