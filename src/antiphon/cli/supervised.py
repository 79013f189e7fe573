"""One of our own commands as a child of `antiphon serve`.

Owns its address: the port is kept over restarts, so that others find it again. It is ready when it
says so on stdout (cli/events.py) and well while its health page says 200.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from antiphon.cli.events import Progress, Ready, read
from antiphon.cli.options import LOOPBACK, base_url

ANTIPHON = (sys.executable, "-m", "antiphon.cli.main")
_HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """How a command is run. `command` gets --host, --port and --supervised added."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    port: int = 0  # 0: any free one, kept over restarts
    has_tls: bool = False
    health_path: str
    grace_s: float


class SupervisedCommand:
    """A `Program` (cli/child.py) that talks in events."""

    def __init__(
        self,
        settings: CommandSettings,
        on_progress: Callable[[str, Progress], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = settings.name
        self.grace_s = settings.grace_s
        self.environ = settings.environ
        self.port = settings.port
        self._settings = settings
        self._on_progress = on_progress
        self._say = say
        self._ready = asyncio.Event()

    @property
    def url(self) -> str:
        """Where this machine reaches it; its port is known once it was ready."""
        return base_url(self._settings.host, self.port, has_tls=self._settings.has_tls)

    def begin(self) -> list[str]:
        """The command line of a new life."""
        self._ready.clear()
        address = ("--host", self._settings.host, "--port", str(self.port))
        return [*self._settings.command, *address, "--supervised"]

    def hear(self, line: bytes) -> None:
        """An event, or something a library printed."""
        match read(line):
            case Progress() as progress:
                self._on_progress(self.name, progress)
            case Ready(port=port):
                self.port = port
                self._ready.set()
            case None:
                self._say(f"{self.name}: {line.decode(errors='replace').rstrip()}")

    async def until_ready(self) -> None:
        """Wait for the event."""
        await self._ready.wait()

    async def is_well(self) -> bool:
        """Whether the health page says 200."""
        return await fetch(self.url, self._settings.health_path) is not None

    def last_words(self) -> Sequence[str]:
        """None: what it said was passed on at once."""
        return ()


def _unverified() -> ssl.SSLContext:
    """For our own children, whose certificates name other hosts than this one; they are told no secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def fetch(url: str, path: str) -> bytes | None:
    """The body of a GET to a server of our own at this URL; None unless it says 200."""
    place = urlsplit(url)
    tls = _unverified() if place.scheme == "https" else None
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port, ssl=tls)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                return body if head.split(b" ")[1:2] == [b"200"] else None
            finally:
                writer.close()
    except OSError:
        return None
