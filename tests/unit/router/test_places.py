"""Where requests may go: rooms of workers and of servers that answer for us, and news of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Load, Priority, Role
from antiphon.router.lane import Ticket
from antiphon.router.link import WorkerLink
from antiphon.router.places import Places
from antiphon.router.survey import Survey
from support.lines import Lines
from support.loopback import worker_info

IDLE = Load(0, 0, 0, 0, 1000, 0, 0)
FULL = Load(0, 4, 1, 0, 1000, 0, 0)
TICKET = Ticket("t", Priority.DEFAULT, 100, 1e9, 0.0, num_prompt_tokens=50)


class Deaf:
    """Hears nothing: these links never run."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None


class World:
    """Places before workers that are up because a test says so. `heard`: the models of all news."""

    def __init__(self) -> None:
        self.survey = Survey(VirtualClock(), lambda: 0.0)
        self.places = Places(self.survey, {"far": 3})
        self.heard: list[str] = []
        self.places.watch(self.heard.append)
        self._num_workers = 0

    def worker(self, load: Load = IDLE, role: Role = Role.BOTH) -> WorkerLink:
        number, self._num_workers = self._num_workers, self._num_workers + 1
        link = WorkerLink(f"http://w{number}:1", "", Deaf(), Lines().logger(), number)
        link.info = worker_info("near", max_sequences=4, role=role)
        link.load = load
        self.survey.link_is_up(link)
        return link

    def report(self, link: WorkerLink, load: Load) -> None:
        link.load = load
        self.survey.load_changed(link)

    def num_open(self) -> int:
        """Workers that would take the ticket."""
        return sum(room.fits(TICKET) for room in self.places.rooms("near", 0))

    def num_new(self) -> int:
        """The same, of those with news."""
        return sum(room.fits(TICKET) for room in self.places.news("near", 0))


@pytest.fixture
def world() -> World:
    return World()


def test_a_server_that_answers_for_us_has_as_many_places_as_it_may_have(world: World) -> None:
    """Those that are there count, whatever anybody reports."""
    rooms = [[room.sequences for room in world.places.rooms("far", there)] for there in (0, 2, 3)]
    assert rooms == [[3], [1], [0]]
    assert [room.sequences for room in world.places.news("far", 1)] == [2]
    assert world.places.is_served("far")


def test_workers_are_places_while_they_take_work(world: World) -> None:
    """A full one is none; one that is lost or leaves is no longer there."""
    assert not world.places.is_served("near")
    first, second = world.worker(), world.worker(FULL)
    assert (world.num_open(), world.places.is_served("near")) == (1, True)
    world.report(second, IDLE)
    assert world.num_open() == 2
    first.is_leaving = True
    world.survey.load_changed(first)
    assert world.num_open() == 1
    world.survey.link_is_down(second)
    assert not world.places.is_served("near")


def test_only_models_that_somebody_waits_for_have_news(world: World) -> None:
    """A report costs nothing else; each report is looked at once."""
    link = world.worker(FULL)
    world.report(link, IDLE)
    assert (world.heard, world.num_new()) == ([], 0)
    world.places.attend_to("near")
    world.report(link, IDLE)
    assert (world.heard, world.num_new(), world.num_new()) == (["near"], 1, 0)
    world.report(link, FULL)
    assert world.num_new() == 0
    world.places.forget("near")
    world.report(link, IDLE)
    assert world.heard == ["near", "near"]


def test_a_lost_worker_is_news_without_room(world: World) -> None:
    """So that those that wait learn that nobody is left."""
    world.places.attend_to("near")
    link = world.worker()
    world.num_new()
    world.survey.link_is_down(link)
    assert world.heard == ["near", "near"]
    assert world.num_new() == 0


def test_a_worker_for_prompts_only_is_no_place_beside_others(world: World) -> None:
    """It answers where there is nobody else."""
    prefill = world.worker(role=Role.PREFILL)
    assert (world.num_open(), world.places.is_served("near")) == (1, True)
    decode = world.worker(FULL, Role.DECODE)
    world.places.attend_to("near")
    world.report(prefill, IDLE)
    assert (world.num_open(), world.num_new()) == (0, 0)
    world.report(decode, IDLE)
    assert (world.num_open(), world.num_new()) == (1, 1)
