"""Which worker gets a generation, and what becomes of answers whose worker was lost."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation, Load, Sampling, StepOutput, Terminal
from antiphon.router import mover as mover_module
from antiphon.router.answer import Answer, Reader
from support.dispatchers import dispatcher
from support.loopback import LoopbackWorker, Session, saying, silent, worker_info


def make_generation(name: str = "g", model: str = "scripted", n: int = 1) -> Generation:
    return Generation(id=name, model=model, sampling=Sampling(seed=1, max_tokens=16), n=n)


async def ends(answer: Answer) -> list[Terminal]:
    """How the choices of this answer ended."""
    reader = Reader([answer], idle_s=60)
    found: list[Terminal] = []
    async with asyncio.timeout(10):
        while (events := await reader.read()) is not None:
            found += [event.finish for _, event in events if event.finish is not None]
    reader.close()
    return found


async def dying_before(session: Session, generation: Generation) -> None:
    """Lost before the first token."""
    await session.close()


async def test_only_workers_of_the_model_are_asked() -> None:
    """A generation goes to the one that serves its model, however busy."""
    other = LoopbackWorker(silent, worker_info("other"))
    right = LoopbackWorker(saying("hi"))
    async with dispatcher(other, right) as made:
        assert [worker.model for worker in made.fleet.workers("other")] == ["other"]
        assert await ends(made.start(make_generation())) == [Terminal.STOP]
        assert right.submits.qsize() == 1
        assert other.submits.empty()


async def test_nobody_serves_the_model() -> None:
    """The error asks the client to come again."""
    async with dispatcher(LoopbackWorker(silent)) as made:
        with pytest.raises(NoReplica) as caught:
            made.start(make_generation(model="missing"))
        assert caught.value.status == 503
        assert caught.value.retry_after_s


async def test_work_is_spread() -> None:
    """Requests that arrive together do not all go to one worker."""
    workers = [LoopbackWorker(silent, worker_info(max_sequences=8)) for _ in range(2)]
    async with dispatcher(*workers) as made:
        answers = [made.start(make_generation(str(number))) for number in range(10)]
        for _ in range(5):
            for worker in workers:
                await asyncio.wait_for(worker.submits.get(), 10)
        for answer in answers:
            answer.abort()
        assert [await ends(answer) for answer in answers] == [[Terminal.ABORTED]] * 10


async def test_an_answer_moves_before_its_first_token() -> None:
    """Its worker is lost, the other one answers, nobody sees a difference."""
    dying, healthy = LoopbackWorker(dying_before), LoopbackWorker(saying("hi"))
    async with dispatcher(dying, healthy) as made:
        answer = made.start(make_generation())
        assert await ends(answer) == [Terminal.STOP]
        assert bytes(answer.received[0].tolist()) == b"hi"
        assert answer.num_moves == 1
        assert healthy.submits.qsize() == 1


async def test_a_draining_worker_turns_away_what_was_on_its_way() -> None:
    """The request goes to another one, all its choices together."""

    async def draining(session: Session, generation: Generation) -> None:
        session.load = Load(0, 0, 0, 0, 0, 0, 0, draining=True)
        refusal = "no_replica: The worker is about to stop."
        await session.send(
            *[
                StepOutput(generation.id, choice, 0, [], Terminal.REFUSED, error=refusal)
                for choice in range(generation.n)
            ]
        )

    healthy = LoopbackWorker(saying("hi"))
    async with dispatcher(LoopbackWorker(draining), healthy) as made:
        assert await ends(made.start(make_generation(n=2))) == [Terminal.STOP, Terminal.STOP]
        assert healthy.submits.qsize() == 1


async def test_other_refusals_do_not_move() -> None:
    """Another worker would say the same."""

    async def refusing(session: Session, generation: Generation) -> None:
        await session.send(
            StepOutput(generation.id, 0, 0, [], Terminal.REFUSED, error="context_length_exceeded: Too long.")
        )

    async with dispatcher(LoopbackWorker(refusing), LoopbackWorker(saying("hi"))) as made:
        assert await ends(made.start(make_generation())) == [Terminal.REFUSED]


async def test_an_answer_without_another_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere to move to within its patience: lost."""
    monkeypatch.setattr(mover_module, "PARKED_S", 0.1)
    worker = LoopbackWorker(dying_before)
    async with dispatcher(worker) as made:
        answer = made.start(make_generation())
        worker.protocol += 1  # it does not come back
        assert await ends(answer) == [Terminal.LOST]
