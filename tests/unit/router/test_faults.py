"""What a gateway does about workers that stall, fail, are slow, stop, or are killed by a request."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.core.errors import Quarantined
from antiphon.core.generation import Generation, Load, Sampling, StepOutput, Terminal, WorkerRates
from antiphon.router import ejection as ejection_module
from antiphon.router import watch as watch_module
from antiphon.router.dispatch import Dispatcher, FailureHandling
from antiphon.router.link import link_url
from antiphon.router.watch import Patience
from support.computing import (
    SAMPLING,
    computing,
    dies,
    dies_of,
    freezes,
    make_generation,
    outputs_of,
    said,
    undisturbed,
)
from support.dispatchers import dispatcher, until
from support.lines import Lines
from support.loopback import LoopbackWorker, Script, Session, saying, silent

SHORT = Sampling(seed=1, max_tokens=16)


def short(name: str = "g") -> Generation:
    return make_generation(1, SHORT, name)


async def end_of(made: Dispatcher, generation: Generation) -> StepOutput:
    """The last output of its answer."""
    return (await outputs_of(made.start(generation)))[-1]


def stopping(worker: list[LoopbackWorker], after_tokens: int) -> Script:
    """Computes, then falls silent as a whole, heartbeats included."""

    async def fault(session: Session) -> None:
        worker[0].beats = False
        await freezes(session)

    return computing(fault, after_tokens)


async def failing(session: Session, generation: Generation) -> None:
    """A step that failed."""
    await session.send(StepOutput(generation.id, 0, 0, [], Terminal.ERROR, error="out of luck"))


async def test_a_silent_worker_loses_its_answers_before_its_link() -> None:
    """They go on elsewhere, are ended there, and what it says of them later is ignored."""
    lines = Lines()
    frozen = LoopbackWorker(silent)
    frozen.script = stopping([frozen], 5)
    generation = make_generation(2)
    async with dispatcher(frozen, LoopbackWorker(computing()), lines=lines) as made:
        answer = made.start(generation)
        outputs = await outputs_of(answer)
        assert [said(outputs, choice) for choice in range(2)] == undisturbed(generation)
        assert not lines.named("link.down")
        assert (await asyncio.wait_for(frozen.aborts.get(), 10)).generation == "g"
        (session,) = frozen.sessions
        await session.send(StepOutput("g", 0, 5, [1, 2, 3]))
        await lines.until("link.recovered")
        assert [line["reason"] for line in lines.named("answer.moved")] == ["stall"]
        assert all(link.takes_work for link in made.fleet.links)


async def test_when_nobody_speaks_nothing_moves() -> None:
    """A gateway or machine that stood still is no fault of a worker."""
    lines = Lines()
    workers = [LoopbackWorker(silent), LoopbackWorker(silent)]
    async with dispatcher(*workers, lines=lines) as made:
        answer = made.start(short())
        for worker in workers:
            worker.beats = False
        await lines.until("link.down", 2)
        assert not lines.named("link.silent")
        answer.abort()


async def test_a_failed_step_is_tried_once_more_elsewhere() -> None:
    """The client sees the other worker's answer; alone, or failing again, the worker's words are the end."""
    bad = LoopbackWorker(failing)
    async with dispatcher(bad, LoopbackWorker(saying("hi"))) as made:
        assert (await end_of(made, short())).finish is Terminal.STOP
    async with dispatcher(bad) as made:
        last = await end_of(made, short())
        assert (last.finish, last.error) == (Terminal.ERROR, "out of luck")
    workers = [LoopbackWorker(failing) for _ in range(3)]
    async with dispatcher(*workers) as made:
        assert (await end_of(made, short())).finish is Terminal.ERROR
        assert sum(worker.submits.qsize() for worker in workers) == 2


async def test_retries_stay_within_their_budget() -> None:
    """All workers fail all the time: hardly more is asked of them than by the clients."""
    workers = [LoopbackWorker(failing) for _ in range(2)]
    async with dispatcher(*workers) as made:
        for number in range(100):
            assert (await end_of(made, short(str(number)))).finish is Terminal.ERROR
        assert 100 < sum(worker.submits.qsize() for worker in workers) <= 115


async def test_a_failing_worker_is_ejected() -> None:
    """After five failures in a row it gets nothing more; the good one answers everybody."""
    lines = Lines()
    bad, good = LoopbackWorker(failing), LoopbackWorker(saying("hi"))
    async with dispatcher(bad, good, lines=lines) as made:
        for number in range(30):
            await outputs_of(made.start(short(str(number))))
        assert len(lines.named("worker.ejected")) == 1
        assert bad.submits.qsize() == 5
        assert (await end_of(made, short("last"))).finish is Terminal.STOP


async def test_an_ejected_worker_is_probed_by_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over: of many requests at once one goes there; when that completes it is back."""
    monkeypatch.setattr(ejection_module, "EJECT_S", 0.3)
    speaks = asyncio.Event()

    async def late(session: Session, generation: Generation) -> None:
        await speaks.wait()
        await saying("hi")(session, generation)

    lines = Lines()
    bad, good = LoopbackWorker(failing), LoopbackWorker(silent)
    async with dispatcher(bad, good, lines=lines) as made:
        blocked = [made.start(short(f"long {number}")) for number in range(2)]
        number = 0
        while not lines.named("worker.ejected"):
            number += 1
            made.start(short(f"bad {number}"))
            await asyncio.sleep(0.01)
        bad.script = late
        await until(lambda: all(link.takes_work for link in made.fleet.links))
        num_before = bad.submits.qsize()
        for number in range(20):
            made.start(short(str(number)))
        (link,) = [link for link in made.fleet.links if link.url == link_url(bad.url)]
        assert not link.takes_work
        await until(lambda: bad.submits.qsize() == num_before + 1)
        speaks.set()
        await until(lambda: link.takes_work)
        for answer in blocked:
            answer.abort()


async def test_the_last_worker_is_never_ejected() -> None:
    """It fails, but there is nobody else: it is asked every time."""
    bad = LoopbackWorker(failing)
    async with dispatcher(bad) as made:
        for number in range(12):
            assert (await end_of(made, short(str(number)))).finish is Terminal.ERROR
        assert bad.submits.qsize() == 12


async def test_refusals_eject_nobody() -> None:
    """A full queue and a wrong request are no fault of the worker."""

    async def refusing(session: Session, generation: Generation) -> None:
        error = "rate_limit_exceeded: The worker's queue is full."
        await session.send(StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error=error))

    lines = Lines()
    async with dispatcher(LoopbackWorker(refusing), LoopbackWorker(refusing), lines=lines) as made:
        for number in range(12):
            assert (await end_of(made, short(str(number)))).finish is Terminal.REFUSED
        assert not lines.named("worker.ejected")


@pytest.mark.parametrize("after", [0, 3])
async def test_an_overdue_token_moves_the_answer(after: int) -> None:
    """Its worker lives, but nothing comes: elsewhere once more; there it is the same text."""
    failure = FailureHandling(Patience(first_token_s=0.2, token_s=0.2))
    slow = LoopbackWorker(computing(freezes, after))
    generation = make_generation()
    async with dispatcher(slow, LoopbackWorker(computing()), failure=failure) as made:
        outputs = await outputs_of(made.start(generation))
        assert said(outputs, 0) == undisturbed(generation)[0]
        assert (await asyncio.wait_for(slow.aborts.get(), 10)).generation == "g"


async def test_an_overdue_token_without_another_worker_ends() -> None:
    """With an error that says so, here and at the worker."""
    failure = FailureHandling(Patience(first_token_s=0.1))
    worker = LoopbackWorker(silent)
    async with dispatcher(worker, failure=failure) as made:
        assert (await end_of(made, short())).finish is Terminal.DEADLINE
        assert (await asyncio.wait_for(worker.aborts.get(), 10)).generation == "g"


async def test_a_slow_first_token_is_hedged() -> None:
    """A second worker computes it too; who speaks first goes on, the other is told to stop."""
    failure = FailureHandling(Patience(hedge_after_s=0.1))
    slow, quick = LoopbackWorker(silent), LoopbackWorker(computing())
    generation = make_generation(2)
    async with dispatcher(slow, quick, failure=failure) as made:
        answer = made.start(generation)
        outputs = await outputs_of(answer)
        assert [said(outputs, choice) for choice in range(2)] == undisturbed(generation)
        assert (await asyncio.wait_for(slow.aborts.get(), 10)).generation == "g"
        assert answer.worker == quick.info
        assert sum(link.num_open_answers for link in made.fleet.links) == 0


@pytest.mark.parametrize("fault", [dies, freezes])
async def test_a_hedge_that_is_lost_costs_nothing(fault: object) -> None:
    """The second worker dies before it speaks: the first one's answer is the answer."""
    speaks = asyncio.Event()

    async def late(session: Session, generation: Generation) -> None:
        await speaks.wait()
        await computing()(session, generation)

    failure = FailureHandling(Patience(hedge_after_s=0.1))
    first, second = LoopbackWorker(late), LoopbackWorker(computing(dies if fault is dies else freezes, 0))
    generation = make_generation()
    async with dispatcher(first, second, failure=failure) as made:
        answer = made.start(generation)
        await asyncio.wait_for(second.submits.get(), 10)
        speaks.set()
        outputs = await outputs_of(answer)
        assert said(outputs, 0) == undisturbed(generation)[0]
        assert answer.num_moves == 0


async def test_a_worker_that_stops_gives_answers_back() -> None:
    """It drains, its time is up: what is left goes on elsewhere, and it is no suspect's death."""
    lines = Lines()

    async def stops(session: Session) -> None:
        session.load = Load(0, 0, 0, 0, 0, 0, 0, draining=True)
        for choice in range(2):
            await session.send(StepOutput("g", choice, 0, [], Terminal.LOST, error="The worker stops."))

    generation = make_generation(2)
    async with dispatcher(
        LoopbackWorker(computing(stops, 0)), LoopbackWorker(computing()), lines=lines
    ) as made:
        answer = made.start(generation)
        outputs = await outputs_of(answer)
        assert [said(outputs, choice) for choice in range(2)] == undisturbed(generation)
        assert {line["reason"] for line in lines.named("answer.moved")} == {"drain"}
        assert answer.num_suspicions == 0


@pytest.mark.parametrize(("after", "most_deaths"), [(0, 2), (5, 3)])
async def test_a_request_that_kills_workers_is_found_among_others(after: int, most_deaths: int) -> None:
    """Bystanders are answered to the token; the killer ends, and nobody like it is let in again."""
    lines = Lines()
    workers = [LoopbackWorker(dies_of(b"poison", after)) for _ in range(3)]
    killer = msgspec.structs.replace(
        make_generation(name="killer"), token_ids=list(b"a poison ......."), timeout_s=60.0
    )
    bystanders = [make_generation(1 + number % 2, name=f"b{number}") for number in range(12)]
    async with dispatcher(*workers, lines=lines) as made:
        answers = [made.start(generation) for generation in bystanders[:6]]
        bad = made.start(killer)
        answers += [made.start(generation) for generation in bystanders[6:]]
        ended = await outputs_of(bad)
        assert ended[-1].finish is Terminal.REFUSED
        assert (ended[-1].error or "").startswith("request_quarantined: ")
        for generation, answer in zip(bystanders, answers, strict=True):
            outputs = await outputs_of(answer)
            assert [said(outputs, c) for c in range(generation.n)] == undisturbed(generation)
        assert len(lines.named("link.down")) <= most_deaths
        with pytest.raises(Quarantined):
            again = msgspec.structs.replace(killer.sampling, seed=99, max_tokens=1)
            made.start(msgspec.structs.replace(killer, id="again", sampling=again))
        await until(lambda: all(link.is_up for link in made.fleet.links))
        assert (await end_of(made, make_generation(name="fine"))).finish is not Terminal.REFUSED


async def test_a_worker_that_loses_its_link_twice_in_one_life_died_once() -> None:
    """What went back to it is no killer of two; in another life it would be."""
    lines = Lines()

    async def hangs_up(session: Session, generation: Generation) -> None:
        await session.close()

    worker = LoopbackWorker(hangs_up)
    async with dispatcher(worker, lines=lines) as made:
        answer = made.start(make_generation())
        await until(lambda: len(lines.named("link.down")) >= 2)
        assert answer.num_suspicions == 1
        worker.life += 1
        assert (await outputs_of(answer))[-1].finish is not None
        assert lines.named("request.quarantined")


async def test_a_far_slower_worker_is_ejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the workers say of their own steps; the others do its work."""
    monkeypatch.setattr(watch_module, "_PACE_EVERY_S", 0.05)

    def steps(seconds: float) -> Script:
        async def script(session: Session, generation: Generation) -> None:
            session.load = Load(0, 0, 0, 0, 8, 0, 0, rates=WorkerRates(step_s=seconds))
            await saying("hi")(session, generation)

        return script

    lines = Lines()
    slow, quick = LoopbackWorker(steps(0.5)), LoopbackWorker(steps(0.02))
    async with dispatcher(slow, quick, lines=lines) as made:
        first, second = made.start(short("a")), made.start(short("b"))
        await outputs_of(first)
        await outputs_of(second)
        (line,) = await lines.until("worker.ejected")
        assert line["reason"] == "slow"
        for number in range(5):
            assert (await end_of(made, short(str(number)))).finish is Terminal.STOP
        assert (slow.submits.qsize(), quick.submits.qsize()) == (1, 6)


async def test_workers_may_come_and_go_between_choice_and_answer() -> None:
    """Each request that was let in is answered, whoever is taken off the list or added meanwhile."""
    workers = [LoopbackWorker(computing()) for _ in range(2)]
    generations = [make_generation(1, name=f"g{number}") for number in range(20)]
    async with dispatcher(*workers) as made:
        answers = []
        for number, generation in enumerate(generations):
            answers.append(made.start(generation))
            url = workers[number % 2].url
            made.fleet.remove(url)
            made.fleet.add(url)
            await until(lambda: any(link.takes_work for link in made.fleet.links))
        for generation, answer in zip(generations, answers, strict=True):
            assert said(await outputs_of(answer), 0) == undisturbed(generation)[0]
        assert sum(link.num_open_answers for link in made.fleet.links) == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_whatever_happens_to_workers_answers_are_right(seed: int) -> None:
    """Workers die and stall at random while others live: every choice is its undisturbed self."""
    asyncio.run(_random_faults(random.Random(seed)))


async def _random_faults(chance: random.Random) -> None:
    steady = LoopbackWorker(computing())
    workers = [LoopbackWorker(computing()) for _ in range(2)]
    for worker in workers:
        after = chance.randrange(1, 30)  # who finds two dying before its first token is named their killer
        worker.script = chance.choice([computing(dies, after), stopping([worker], after)])
    sampling = msgspec.structs.replace(
        SAMPLING, seed=chance.randrange(1000), temperature=chance.random() + 0.5
    )
    generations = [make_generation(chance.randrange(1, 4), sampling, f"g{number}") for number in range(4)]
    async with dispatcher(*workers, steady) as made:
        answers = [made.start(generation) for generation in generations]
        for generation, answer in zip(generations, answers, strict=True):
            outputs = await outputs_of(answer)
            assert [said(outputs, c) for c in range(generation.n)] == undisturbed(generation)
        assert made.num_parked == 0
        assert sum(link.num_open_answers for link in made.fleet.links) == 0
