"""A supervised process, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from antiphon.cli import child as child_module
from antiphon.cli.child import Child, StartFailed
from antiphon.cli.supervised import CommandSettings, SupervisedCommand, fetch

PUPPET = Path(__file__).parents[2] / "support" / "puppet.py"


@dataclass
class Heard:
    """What a child's owner was told."""

    notes: list[str] = field(default_factory=list)
    noted: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()


@dataclass
class Puppet:
    """A child and the program it runs."""

    child: Child
    program: SupervisedCommand

    async def pid(self) -> int:
        """The process that answers at the program's port, waiting until one does."""
        while True:
            body = await fetch(self.program.url, "/")
            if body is not None:
                return int(body)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(mode: str, heard: Heard, grace_s: float = 5.0) -> AsyncIterator[Puppet]:
    """A child that is kept running inside the block."""
    settings = CommandSettings(
        name="puppet", command=(sys.executable, str(PUPPET), mode), health_path="/healthz", grace_s=grace_s
    )
    program = SupervisedCommand(settings, lambda name, progress: None, heard.note)
    child = Child(program, heard.note)
    task = asyncio.create_task(child.run())
    try:
        yield Puppet(child, program)
    finally:
        task.cancel()
        await asyncio.wait([task])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_leaving_ends_the_process() -> None:
    """Cancelling `run` leaves no process behind."""
    heard = Heard()
    async with running("good", heard) as puppet:
        await puppet.child.first_ready
        pid = await puppet.pid()
    assert not is_alive(pid)
    assert heard.notes == []


async def test_killed_child_comes_back_at_its_port() -> None:
    """A child that dies is started again, under the address that others know."""
    heard = Heard()
    async with running("good", heard) as puppet:
        await puppet.child.first_ready
        port, first = puppet.program.port, await puppet.pid()
        os.kill(first, signal.SIGKILL)
        await heard.noted.wait()
        second = await puppet.pid()
        assert second != first
        assert puppet.program.port == port
    assert heard.notes == ["puppet ended (SIGKILL); starting it again"]


async def test_child_that_dies_often_is_started_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and later deaths in a row are followed by pauses that double."""
    monkeypatch.setattr(child_module, "_PAUSE_MIN_S", 0.01)
    heard = Heard()
    async with running("good", heard) as puppet:
        await puppet.child.first_ready
        for _ in range(4):
            pid = await puppet.pid()
            heard.noted.clear()
            os.kill(pid, signal.SIGKILL)
            await heard.noted.wait()
    pauses = [note.partition("again")[2] for note in heard.notes]
    assert pauses == ["", " in 0.01 s", " in 0.02 s", " in 0.04 s"]


async def test_child_that_says_why_it_cannot_start_is_not_tried_again() -> None:
    """An exit code before the first ready is final."""
    heard = Heard()
    async with running("quits", heard) as puppet:
        with pytest.raises(StartFailed, match=r"puppet could not start \(exit code 3\)"):
            await puppet.child.first_ready
    assert heard.notes == []


async def test_child_that_crashes_at_start_is_tried_three_times() -> None:
    """A crash may be bad luck; three in a row are not."""
    heard = Heard()
    async with running("crashes", heard) as puppet:
        with pytest.raises(StartFailed, match=r"could not start \(SIGKILL\)"):
            await puppet.child.first_ready
    assert len(heard.notes) == 2


async def test_child_that_ignores_the_request_to_stop_is_killed() -> None:
    """After the grace period no process is left, whatever it wants."""
    heard = Heard()
    async with running("deaf", heard, grace_s=0.1) as puppet:
        await puppet.child.first_ready
        pid = await puppet.pid()
    assert not is_alive(pid)
    assert heard.notes == ["puppet did not stop within 0.1 s; ending it"]


async def test_kill_ends_a_deaf_child_at_once() -> None:
    """`kill` does not wait for the grace period: the child is gone and comes back."""
    heard = Heard()
    async with running("deaf", heard, grace_s=0.1) as puppet:
        await puppet.child.first_ready
        first = await puppet.pid()
        puppet.child.kill()
        await heard.noted.wait()
        assert not is_alive(first)


async def test_child_without_health_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lives but says 503 to its health check is ended."""
    monkeypatch.setattr(child_module, "_HEALTH_EVERY_S", 0.01)
    heard = Heard()
    async with running("sick", heard) as puppet:
        await puppet.child.first_ready
        await heard.noted.wait()
        assert heard.notes[0] == "puppet lives but does no work; ending it"


async def test_healthy_child_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many health checks of a good process end nothing."""
    monkeypatch.setattr(child_module, "_HEALTH_EVERY_S", 0.001)
    heard = Heard()
    async with running("good", heard) as puppet:
        await puppet.child.first_ready
        before = await puppet.pid()
        for _ in range(20):
            await puppet.pid()
        assert await puppet.pid() == before
    assert heard.notes == []
