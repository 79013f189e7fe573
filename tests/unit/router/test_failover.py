"""Answers whose worker is lost go on elsewhere, to the token as if nothing had happened.

Workers compute with a real engine whose text depends on its KV, at temperature 1 with penalties and
log probabilities: a wrong seed, position, penalty count or block would change what follows.
"""

from __future__ import annotations

import array
import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import Generation, Sampling, StepOutput, Terminal
from antiphon.router import mover as mover_module
from antiphon.router.dispatch import Dispatcher
from antiphon.router.failover import continuations
from support.computing import SAMPLING, computing, dies, make_generation, outputs_of, said, undisturbed
from support.dispatchers import dispatcher, until
from support.loopback import LoopbackWorker, Session, saying, worker_info


async def answer_of(made: Dispatcher, generation: Generation) -> list[list[object]]:
    outputs = await outputs_of(made.start(generation))
    assert all(len([o for o in outputs if o.choice == c and o.cached]) <= 1 for c in range(generation.n))
    return [said(outputs, choice) for choice in range(generation.n)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 7, 39])
async def test_an_answer_goes_on_where_its_worker_was_lost(n: int, after: int) -> None:
    """Ids, log probabilities and ends are those of an undisturbed run, choice by choice."""
    generation = make_generation(n)
    async with dispatcher(LoopbackWorker(computing(dies, after)), LoopbackWorker(computing())) as made:
        assert await answer_of(made, generation) == undisturbed(generation)


async def test_an_answer_may_move_many_times() -> None:
    """As long as each worker brings some tokens, none are lost and none come twice."""
    workers = [LoopbackWorker(computing(dies, after)) for after in (9, 8, 7, 6)]
    generation = make_generation(2)
    async with dispatcher(*workers, LoopbackWorker(computing())) as made:
        answer = made.start(generation)
        outputs = await outputs_of(answer)
        assert [said(outputs, choice) for choice in range(2)] == undisturbed(generation)
        assert answer.num_moves >= 4


async def test_a_lost_worker_is_followed_by_one_that_comes_back() -> None:
    """With a single worker the answer waits until it was started again."""
    worker = LoopbackWorker(computing(dies, 5))
    generation = make_generation()
    async with dispatcher(worker) as made:
        answer = made.start(generation)
        await asyncio.wait_for(worker.submits.get(), 10)
        worker.script = computing()
        outputs = await outputs_of(answer)
        assert said(outputs, 0) == undisturbed(generation)[0]
        assert answer.num_moves == 1


async def test_what_comes_once_comes_once() -> None:
    """Cached tokens and queue time are the first worker's; the next one's would be counted twice."""
    async with dispatcher(
        LoopbackWorker(computing(dies, 8)), LoopbackWorker(saying(bytes(16), cached=7))
    ) as made:
        sampling = msgspec.structs.replace(SAMPLING, logprobs=None)
        outputs = await outputs_of(made.start(make_generation(2, sampling)))
    for choice in range(2):
        mine = [output for output in outputs if output.choice == choice]
        assert [o.cached is not None for o in mine].count(True) == 1
        assert [o.queued_s is not None for o in mine].count(True) == 1
        assert all(o.cached is None or (o.cached.store == 0 and o.cached.engine != 7) for o in mine)


async def test_a_finished_choice_is_not_asked_for_again() -> None:
    """Of two choices one had ended: the next worker gets the other one only, with its received ids."""

    async def half(session: Session, generation: Generation) -> None:
        await session.send(
            StepOutput(generation.id, 0, 0, [104], Terminal.STOP), StepOutput(generation.id, 1, 0, [105, 106])
        )
        await session.close()

    following = LoopbackWorker(saying("ijk"))
    async with dispatcher(LoopbackWorker(half), following) as made:
        sampling = Sampling(seed=1, max_tokens=8)
        answer = made.start(make_generation(2, sampling))
        outputs = await outputs_of(answer)
    asked = following.submits.get_nowait()
    assert following.submits.empty()
    assert (asked.choice, asked.n, asked.token_ids[16:], asked.sampling) == (1, 2, [105, 106], sampling)
    assert asked.id != "g"
    assert 0 < (asked.timeout_s or 0) <= 60
    assert [o.finish for o in outputs if o.choice == 0] == [Terminal.STOP]
    assert bytes(answer.received[1].tolist()) == b"ijk"


async def test_an_answer_that_lacks_only_its_end_ends() -> None:
    """All its tokens had come when the worker was lost: there is nothing left to compute."""

    async def full(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [104, 105]))
        await session.close()

    idle = LoopbackWorker(saying("x"))
    async with dispatcher(LoopbackWorker(full), idle) as made:
        outputs = await outputs_of(made.start(make_generation(1, Sampling(seed=1, max_tokens=2))))
    assert [o.finish for o in outputs if o.finish] == [Terminal.LENGTH]
    assert idle.submits.empty()


async def test_another_namespace_may_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may differ: what has begun waits for one of its own, and ends as lost without."""
    monkeypatch.setattr(mover_module, "PARKED_S", 0.2)
    first, other = (
        LoopbackWorker(computing(dies, 3)),
        LoopbackWorker(saying("x"), worker_info(namespace="other")),
    )
    async with dispatcher(first, other) as made:
        answer = made.start(make_generation())
        await asyncio.wait_for(first.submits.get(), 10)
        first.protocol += 1  # it does not come back
        outputs = await outputs_of(answer)
        assert outputs[-1].finish is Terminal.LOST
        assert other.submits.empty()
        assert answer.num_moves == 0


async def test_another_namespace_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first token nobody can tell the difference."""
    other = LoopbackWorker(saying("x"), worker_info(namespace="other"))
    async with dispatcher(LoopbackWorker(computing(dies, 0)), other) as made:
        sampling = msgspec.structs.replace(SAMPLING, logprobs=None)
        outputs = await outputs_of(made.start(make_generation(1, sampling)))
        assert outputs[-1].finish is Terminal.STOP


async def test_a_parked_answer_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client leaves while it waits for a replica: nobody is asked any more."""
    worker = LoopbackWorker(computing(dies, 3))
    async with dispatcher(worker) as made:
        answer = made.start(make_generation())
        await asyncio.wait_for(worker.submits.get(), 10)
        await until(lambda: made.num_parked == 1)
        answer.abort()
        await until(lambda: made.num_parked == 0)
        assert worker.submits.empty()


async def test_what_is_parked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the bound an answer ends at once."""
    monkeypatch.setattr(mover_module, "MAX_PARKED", 2)
    worker = LoopbackWorker(computing(dies, 3))
    async with dispatcher(worker) as made:
        answer = made.start(make_generation(3))
        worker.protocol += 1
        outputs = await outputs_of(answer)
        assert [o.finish for o in outputs if o.finish] == [Terminal.LOST] * 3


async def test_a_gateway_that_stops_moves_nothing() -> None:
    """Its links end, so do its answers."""
    other = LoopbackWorker(saying("x"))
    async with dispatcher(LoopbackWorker(computing(dies, 100)), other) as made:
        sampling = msgspec.structs.replace(SAMPLING, max_tokens=3000, min_tokens=3000)
        answer = made.start(make_generation(1, sampling))
        await until(lambda: answer.has_started)
    assert (await outputs_of(answer))[-1].finish is Terminal.LOST
    assert other.submits.empty()


@given(st.lists(st.lists(st.integers(0, 255), max_size=5), min_size=1, max_size=4), st.data())
def test_continuations_ask_for_exactly_the_rest(ids: list[list[int]], data: st.DataObject) -> None:
    """Each open choice is asked for once, after exactly the ids received, under an id of its own."""
    n = len(ids)
    generation = make_generation(n)
    received = [array.array("I", choice) for choice in ids]
    choices = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1).map(sorted))
    parts = continuations(generation, received, choices, 2, 5.0)
    assert [choice for part in parts for choice in part.choices] == choices
    assert len({part.id for part in parts} | {generation.id}) == len(parts) + 1
    for part in parts:
        assert part.timeout_s == 5.0
        assert part.num_prompt_tokens == 16
        for choice in part.choices:
            assert part.token_ids == generation.token_ids + ids[choice]
