"""Our own commands as children, with a real process behind them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.cli.child import Child
from antiphon.cli.events import Progress
from antiphon.cli.supervised import CommandSettings, SupervisedCommand, fetch

PUPPET = Path(__file__).parents[2] / "support" / "puppet.py"


@dataclass
class Heard:
    """What the owner of a command was told."""

    notes: list[str] = field(default_factory=list)
    progress: list[tuple[str, Progress]] = field(default_factory=list)


def _command(mode: str, heard: Heard, **environ: str) -> SupervisedCommand:
    settings = CommandSettings(
        name="puppet",
        command=(sys.executable, str(PUPPET), mode),
        environ=environ,
        health_path="/healthz",
        grace_s=5.0,
    )
    return SupervisedCommand(
        settings, lambda name, progress: heard.progress.append((name, progress)), heard.notes.append
    )


@asynccontextmanager
async def ready(command: SupervisedCommand, heard: Heard) -> AsyncIterator[None]:
    """The command runs and was ready inside the block."""
    child = Child(command, heard.notes.append)
    task = asyncio.create_task(child.run())
    try:
        await child.first_ready
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_ready_command_has_its_port_and_tells_progress() -> None:
    """The port comes from the ready event, progress under the command's name before it."""
    heard = Heard()
    command = _command("good", heard)
    async with ready(command, heard):
        assert command.port != 0
        assert command.url == f"http://127.0.0.1:{command.port}"
        assert heard.progress == [("puppet", Progress("warming up", 0.5))]
        assert await command.is_well()
    assert not await command.is_well()


async def test_sick_command_is_not_well() -> None:
    """A health page that says 503 is heard as what it is."""
    heard = Heard()
    command = _command("sick", heard)
    async with ready(command, heard):
        assert not await command.is_well()


async def test_lines_that_are_no_events_are_passed_on() -> None:
    """What a library prints is shown with the command's name, not lost and not obeyed."""
    heard = Heard()
    async with ready(_command("chatty", heard), heard):
        pass
    assert heard.notes == ["puppet: a library says hello"]


async def test_environment_of_a_command_is_not_in_its_command_line() -> None:
    """What others must not see in `ps` reaches the process another way."""
    heard = Heard()
    async with ready(command := _command("tells", heard, PUPPET_WORD="a password"), heard):
        assert heard.notes == ["puppet: a password"]
    assert "a password" not in " ".join(command.begin())


async def test_new_life_must_say_that_it_is_ready_itself() -> None:
    """The ready event of one life does not stand for the next; its port does."""
    heard = Heard()
    command = _command("good", heard)
    async with ready(command, heard):
        port = command.port
    again = command.begin()
    assert again[again.index("--port") + 1] == str(port)
    waiting = asyncio.ensure_future(command.until_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    command.hear(b'{"event":"ready","port":7}\n')
    await waiting
    assert command.port == 7


async def test_fetch_of_nothing_is_none() -> None:
    """Where nobody listens there is no body, and no exception."""
    assert await fetch("http://127.0.0.1:1", "/healthz") is None
