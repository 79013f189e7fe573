"""Workers that tell nothing are named once; the figures of the directory; leftovers go."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Load
from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks
from antiphon.obs.metrics import DirectoryMetrics
from antiphon.router.directory import BlockDirectory
from antiphon.router.directorywatch import SILENT_S, DirectoryWatch
from antiphon.router.link import LinkListener, WorkerLink
from support.lines import Lines


class Deaf:
    """Hears nothing: these links never run."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None


class World:
    """A directory, its watch, and links whose reports a test decides."""

    def __init__(self, num_links: int = 1) -> None:
        self.clock = VirtualClock()
        self.lines = Lines()
        self.directory = BlockDirectory()
        self.watch = DirectoryWatch(self.directory, self.clock, self.lines.logger())
        self.registry = CollectorRegistry()
        self.metrics = DirectoryMetrics(self.registry)
        listener: LinkListener = Deaf()
        log = self.lines.logger()
        self.links = [WorkerLink(f"http://w{n}:1", "", listener, log, n) for n in range(num_links)]
        for link in self.links:
            self.directory.join(link.replica, 1, 0.0)

    def pass_time(self, seconds: float, grows: WorkerLink | None = None) -> None:
        """Ticks, and a report with one block more before each where a link grows."""
        for _ in range(round(4 * seconds)):
            if grows is not None:
                grows.load = msgspec.structs.replace(grows.load, cached_blocks=grows.load.cached_blocks + 1)
            self.clock.advance(0.25)
            self.watch.tick(self.links)

    def tell(self, link: WorkerLink, number: int) -> None:
        change = BlockChange(Tier.ENGINE, True, number.to_bytes(8, "little"))
        part = 0 if number == 1 else None
        self.directory.take(link.replica, Blocks(1, number, [change], part, is_last=True), self.clock.now())

    def figure(self, name: str, **labels: str) -> float | None:
        self.watch.measure(self.metrics, self.links)
        return self.registry.get_sample_value(f"antiphon_router_directory_{name}", labels)


def test_a_worker_whose_cache_grows_in_silence_is_named_once() -> None:
    """Row 37: no events from X, and somebody says so; the metrics for as long as it lasts."""
    world = World(num_links=2)
    silent, other = world.links
    world.tell(other, 1)
    world.pass_time(4 * SILENT_S, grows=silent)
    (line,) = world.lines.named("directory.no_news")
    assert line["worker"] == silent.url
    assert world.figure("silent", worker=silent.url) == 1
    assert world.figure("silent", worker=other.url) == 0


def test_news_end_the_alarm_and_a_new_silence_is_a_new_one() -> None:
    """It is said that it speaks again."""
    world = World()
    (link,) = world.links
    world.pass_time(2 * SILENT_S, grows=link)
    world.tell(link, 1)
    world.pass_time(2.0)
    assert len(world.lines.named("directory.news_again")) == 1
    assert world.figure("silent", worker=link.url) == 0
    world.pass_time(2 * SILENT_S, grows=link)
    assert len(world.lines.named("directory.no_news")) == 2


def test_an_idle_worker_and_one_that_speaks_are_no_alarm() -> None:
    """Nothing new to tell is no silence; nor is a cache that shrinks, or grows and is told of."""
    world = World(num_links=2)
    idle, busy = world.links
    idle.load = Load(9, 0, 0, 0, 0, 500, 0)
    for link in world.links:
        world.tell(link, 1)
    for number in range(2, 20):
        world.pass_time(1.0, grows=busy)
        world.tell(busy, number)
        idle.load = msgspec.structs.replace(idle.load, cached_blocks=idle.load.cached_blocks - 1)
    assert world.lines.named("directory.no_news") == []


def test_figures_are_of_the_workers_that_are_here() -> None:
    """Blocks and age by worker, store, what was ignored; a worker that left has no line."""
    world = World()
    (link,) = world.links
    world.tell(link, 1)
    world.tell(link, 2)
    world.tell(link, 2)
    world.tell(link, 9)
    world.clock.advance(3.0)
    assert world.figure("blocks", worker=link.url) == 2
    assert world.figure("age_seconds", worker=link.url) == 3.0
    assert world.figure("store_blocks") == 0
    assert world.figure("events_total", event="ignored") == 1
    assert world.figure("events_total", event="gap") == world.figure("events_total", event="resync") == 1
    world.directory.leave(link.replica)
    assert world.figure("blocks", worker=link.url) is None
    assert world.figure("events_total", event="gap") == 1


def test_ticks_clean_up_after_workers_that_left() -> None:
    """However many blocks they held, a little at each tick."""
    world = World()
    keys = b"".join(number.to_bytes(8, "little") for number in range(5000))
    world.directory.take(0, Blocks(1, 1, [BlockChange(Tier.HOST, True, keys)], 0, is_last=True), 0.0)
    world.directory.leave(0)
    assert world.directory.num_blocks == 5000
    world.pass_time(1.0)
    assert world.directory.num_blocks == 0
