"""Who is told of erased tenants, when, and how often."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.errors import StoreUnavailable
from antiphon.core.scope import ScopeMaker
from antiphon.gateway.erasures import MOST_ERASURES, REPEAT_S, SETTLED_S, ErasureWatch
from antiphon.store.tenants import Erasure
from support.lines import Lines

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
SCOPES = ScopeMaker(bytes(32))


@dataclass
class Base:
    """A database that says what the test wants."""

    found: list[Erasure] = field(default_factory=list)
    is_broken: bool = False

    async def erasures(self, since: datetime.datetime, most: int) -> Sequence[Erasure]:
        assert since.tzinfo is not None
        assert most == MOST_ERASURES
        if self.is_broken:
            raise StoreUnavailable("no", detail="it is down")
        return self.found


@dataclass
class Worker:
    """What it was told, in order."""

    url: str = "ws://w"
    life: int = 1
    is_up: bool = True
    takes: bool = True
    told: list[list[bytes]] = field(default_factory=list)

    def forget(self, tenants: Sequence[bytes]) -> bool:
        if self.takes:
            self.told.append(sorted(tenants))
        return self.takes


class World:
    """A watch over some workers."""

    def __init__(self, *links: Worker) -> None:
        self.base = Base()
        self.links = list(links)
        self.clock = VirtualClock()
        self.lines = Lines()
        self.watch = ErasureWatch(self.base, self, SCOPES, self.clock, self.lines.logger())

    def erase(self, *tenant_ids: str) -> list[bytes]:
        """These are erased now; what their scopes begin with."""
        first = len(self.base.found)
        self.base.found += [
            Erasure(f"erasure_{first + n}", tenant_id, NOW, {}) for n, tenant_id in enumerate(tenant_ids)
        ]
        return sorted(SCOPES.tenant_part(tenant_id) for tenant_id in tenant_ids)

    async def pass_s(self, seconds: float) -> None:
        """Look every five seconds until so much time has gone."""
        for _ in range(int(seconds / 5)):
            self.clock.advance(5.0)
            await self.watch.look()


async def test_every_worker_is_told_once() -> None:
    """All of one look in one message; nothing where nobody was erased."""
    one, two = Worker("ws://one"), Worker("ws://two")
    world = World(one, two)
    await world.watch.look()
    assert one.told == two.told == []
    tenants = world.erase("tenant_a", "tenant_b")
    await world.pass_s(REPEAT_S - 5)
    assert one.told == two.told == [tenants]


async def test_they_are_told_again_until_no_answer_can_be_open() -> None:
    """An answer that was open when its tenant was erased leaves KV behind when it ends; then it is enough."""
    worker = Worker()
    world = World(worker)
    tenants = world.erase("tenant_a")
    await world.pass_s(SETTLED_S + 10 * REPEAT_S)
    assert set(map(tuple, worker.told)) == {tuple(tenants)}
    num_told = len(worker.told)
    assert SETTLED_S / REPEAT_S <= num_told <= SETTLED_S / REPEAT_S + 2
    later = world.erase("tenant_b")
    await world.pass_s(5)
    assert worker.told[num_told:] == [later]


@pytest.mark.parametrize("is_new_life", [False, True])
async def test_one_that_was_away_is_told_when_it_is_back(is_new_life: bool) -> None:
    """Whether it was out of reach, or was started again, long after the others."""
    worker = Worker(is_up=False)
    world = World(worker)
    tenants = world.erase("tenant_a")
    await world.pass_s(2 * SETTLED_S)
    assert worker.told == []
    worker.is_up = True
    worker.life += is_new_life
    await world.pass_s(5)
    assert worker.told == [tenants]


async def test_one_that_cannot_be_told_is_tried_again() -> None:
    """Its outbox was full, say."""
    worker = Worker(takes=False)
    world = World(worker)
    tenants = world.erase("tenant_a")
    await world.pass_s(10)
    worker.takes = True
    await world.pass_s(10)
    assert worker.told == [tenants]


async def test_a_tenant_erased_twice_is_told_anew() -> None:
    """Its id goes once in a message; the second erasure is news."""
    worker = Worker()
    world = World(worker)
    tenants = world.erase("tenant_a", "tenant_a")
    assert tenants[0] == tenants[1]
    await world.pass_s(5)
    assert worker.told == [tenants[:1]]
    world.erase("tenant_a")
    await world.pass_s(5)
    assert worker.told == [tenants[:1]] * 2


async def test_a_database_that_is_away_is_said_once() -> None:
    """What is known is told on; when it answers again, the next fault is news."""
    worker = Worker(is_up=False)
    world = World(worker)
    tenants = world.erase("tenant_a")
    await world.watch.look()
    world.base.is_broken = True
    await world.pass_s(20)
    worker.is_up = True
    await world.pass_s(5)
    assert worker.told == [tenants]
    assert [line["detail"] for line in world.lines.named("erasures.unavailable")] == ["it is down"]
    world.base.is_broken = False
    await world.pass_s(5)
    world.base.is_broken = True
    await world.pass_s(10)
    assert len(world.lines.named("erasures.unavailable")) == 2


async def test_old_erasures_and_lost_workers_are_forgotten() -> None:
    """The watch holds what the database says of the last day, for the workers that there are."""
    world = World(Worker("ws://one"), Worker("ws://two"))
    world.erase("tenant_a")
    await world.pass_s(5)
    world.base.found.clear()
    world.links.pop()
    await world.pass_s(5)
    assert not world.watch._known
    assert world.watch._told_s == {("ws://one", 1): {}}
