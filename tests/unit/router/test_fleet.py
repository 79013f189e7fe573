"""Workers come and go while the gateway runs; no answer is lost by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Generation, Sampling
from antiphon.core.wire import Blocks
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.fleet import Fleet, replica_number
from antiphon.router.link import Failure, WorkerLink
from support.lines import Lines
from support.loopback import SECRET, LoopbackWorker, saying, silent


class Ears:
    """Hears what becomes of the links."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[str] = []
        self.num_changes = 0
        self.changed = asyncio.Event()

    def link_is_up(self, link: WorkerLink) -> None:
        self.up.append(link.url)
        self.changed.set()

    def load_changed(self, link: WorkerLink) -> None:
        self.num_changes += 1

    def link_is_down(self, link: WorkerLink, lost: Sequence[Attempt], *, was_draining: bool) -> None:
        assert not lost
        self.down.append(link.url)
        self.changed.set()

    def attempts_failed(self, link: WorkerLink, failures: Sequence[Failure]) -> None:
        raise AssertionError("no answer fails here")

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        raise AssertionError("nobody speaks of blocks here")

    async def until(self, num_up: int, num_down: int) -> None:
        async with asyncio.timeout(10):
            while (len(self.up), len(self.down)) != (num_up, num_down):
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def running(*urls: str) -> AsyncIterator[tuple[Fleet, Ears]]:
    ears = Ears()
    fleet = Fleet(urls, SECRET, ears, Lines().logger())
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet, ears
    finally:
        task.cancel()
        await asyncio.wait([task])


def generation() -> Generation:
    return Generation(id="g", model="scripted", sampling=Sampling(seed=1, max_tokens=16))


async def test_a_worker_may_join_a_running_fleet() -> None:
    """An address that is added is linked at once; adding it again changes nothing."""
    async with running() as (fleet, ears), LoopbackWorker(saying(b"hi")).running() as worker:
        fleet.add(worker.url)
        fleet.add(worker.url)
        await ears.until(1, 0)
        assert [info.model for info in fleet.workers("scripted")] == ["scripted"]
        assert fleet.workers("other") == []


async def test_an_idle_worker_that_is_removed_is_unlinked_at_once() -> None:
    """Nothing is open there, so nothing is waited for; removing it again changes nothing."""
    async with LoopbackWorker(saying(b"hi")).running() as worker, running(worker.url) as (fleet, ears):
        await ears.until(1, 0)
        fleet.remove(worker.url)
        fleet.remove(worker.url)
        await ears.until(1, 1)
        assert fleet.links == []


async def test_a_removed_worker_finishes_its_answers() -> None:
    """It gets no more work, and its link ends when the last answer has."""
    async with LoopbackWorker(silent).running() as worker, running(worker.url) as (fleet, ears):
        await ears.until(1, 0)
        (link,) = fleet.links
        answer = Answer(generation())
        link.submit(Attempt(answer, answer.generation))
        fleet.remove(worker.url)
        assert not link.takes_work
        assert fleet.links == [link]
        assert ears.down == []
        answer.abort()
        await ears.until(1, 1)
        assert fleet.links == []


async def test_a_worker_that_comes_back_before_it_is_gone_stays() -> None:
    """Its lease was late, not its process."""
    async with LoopbackWorker(silent).running() as worker, running(worker.url) as (fleet, ears):
        await ears.until(1, 0)
        (link,) = fleet.links
        answer = Answer(generation())
        link.submit(Attempt(answer, answer.generation))
        fleet.remove(worker.url)
        fleet.add(worker.url)
        assert link.takes_work
        answer.abort()
        assert fleet.links == [link]


async def test_an_address_that_is_none_is_refused() -> None:
    """With the words that say what to write."""
    async with running() as (fleet, _):
        with pytest.raises(BadRequest, match="write http://HOST:PORT"):
            fleet.add("worker-1")


def test_a_worker_has_the_same_number_at_every_gateway() -> None:
    """Whatever the order in which they heard of it; another address has another number."""
    urls = [f"ws://10.0.0.{host}:8100/link" for host in range(200)]
    assert replica_number(urls[7]) == replica_number(urls[7])
    assert len({replica_number(url) for url in urls}) == 200
    assert all(0 <= replica_number(url) < 2**56 for url in urls)
