"""bench/servers.py: a server is awaited, measured, and gone at the end."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench.errors import BenchFault
from bench.servers import Command, free_port, running

# Answers 200 on /ready; has a child of its own; with "deaf" neither heeds the request to stop.
SERVER = """
import http.server, signal, subprocess, sys
port, deaf = int(sys.argv[1]), sys.argv[2] == "deaf"
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def command(*, manner: str = "polite", ready_path: str = "/ready", ready_s: float = 30.0) -> Command:
    """The test server on a free port."""
    port = free_port()
    argv = [sys.executable, "-c", SERVER, str(port), manner]
    return Command("test server", argv, f"http://127.0.0.1:{port}", ready_path, ready_s=ready_s)


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, waiting a little for whoever has to collect it."""
    try:
        process.wait(10)
    except psutil.TimeoutExpired:
        return False
    return True


async def test_the_whole_tree_is_gone_afterwards() -> None:
    """Server and its child both end with the block."""
    async with running(command()) as server:
        tree = server.tree()
        assert len(tree) == 2
    assert all(is_gone(process) for process in tree)


async def test_a_deaf_server_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ignores the request to stop is killed with its tree."""
    monkeypatch.setattr("bench.servers._STOP_S", 0.1)
    async with running(command(manner="deaf")) as server:
        tree = server.tree()
    assert all(is_gone(process) for process in tree)


async def test_a_server_is_killed_at_once_where_that_is_asked(tmp_path: Path) -> None:
    """No request to stop goes before it."""
    heeding = (
        "import pathlib, signal, sys\nfolder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'asked').touch())\n"
        "(folder / 'up').touch()\nwhile True: signal.pause()\n"
    )

    async def is_up() -> bool:
        return (tmp_path / "up").exists()

    argv = [sys.executable, "-c", heeding, str(tmp_path)]
    async with running(Command("heeding", argv, "", "", probe=is_up), stop=signal.SIGKILL) as server:
        process = server.root
    assert is_gone(process)
    assert not (tmp_path / "asked").exists()


async def test_a_probe_says_when_a_server_is_ready() -> None:
    """Where a server speaks no HTTP its own probe is asked until it says yes."""
    asked = iter([False, False, True])

    async def probe() -> bool:
        return next(asked)

    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    async with running(Command("mute", argv, "unix:///nowhere", "", probe=probe)):
        assert next(asked, None) is None


async def test_the_tree_is_gone_after_an_error_too() -> None:
    """An exception in the block passes through and leaves no process."""
    with pytest.raises(ZeroDivisionError):
        async with running(command()) as server:
            tree = server.tree()
            raise ZeroDivisionError
    assert all(is_gone(process) for process in tree)


async def test_counts_cpu_and_memory_of_the_tree() -> None:
    """CPU seconds only grow, and two interpreters take more memory than nothing."""
    async with running(command()) as server:
        before_s = server.cpu_s()
        assert before_s > 0
        assert server.rss_bytes() > 5 * 2**20
        assert server.cpu_s() >= before_s


async def test_names_mapped_files(tmp_path: Path) -> None:
    """A file that the server has mapped is found by its suffix."""
    weights = tmp_path / "m.gguf"
    weights.write_bytes(bytes(8192))
    mapper = (
        "import mmap, sys\nfile = open(sys.argv[3], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n" + SERVER
    )
    port = free_port()
    argv = [sys.executable, "-c", mapper, str(port), "polite", str(weights)]
    async with running(Command("mapper", argv, f"http://127.0.0.1:{port}", "/ready")) as server:
        assert server.mapped_files(".gguf") == [weights]


async def test_a_server_that_ends_at_start_shows_its_output() -> None:
    """The error holds the status and the last lines it wrote."""
    argv = [sys.executable, "-c", "import sys; sys.exit('no model here')"]
    broken = Command("broken", argv, "http://127.0.0.1:1", "/ready")
    with pytest.raises(BenchFault, match=r"(?s)broken ended at start, status 1.*no model here"):
        async with running(broken):
            pass


async def test_a_server_that_is_never_ready_is_given_up() -> None:
    """Readiness has a deadline."""
    with pytest.raises(BenchFault, match=r"not ready within 0\.3 s"):
        async with running(command(ready_path="/never", ready_s=0.3)):
            pass


async def test_a_server_that_dies_under_load_is_reported() -> None:
    """A measurement of a dead server is no measurement."""
    with pytest.raises(BenchFault, match="ended while it was measured"):
        async with running(command()) as server:
            server.root.kill()
            deadline_s = time.monotonic() + 10
            while server.root.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
                pass
