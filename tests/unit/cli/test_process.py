"""What a gateway or worker process says, and why it could not listen."""

from __future__ import annotations

import asyncio
import errno
import json
import socket

import pytest

from antiphon.cli.process import Reporter, address_error, run_process
from antiphon.core.errors import BadRequest


def test_supervised_process_speaks_events(capsys: pytest.CaptureFixture[str]) -> None:
    """For `serve`: one JSON object a line on stdout."""
    reporter = Reporter("worker", "127.0.0.1", supervised=True)
    reporter.progress("loading", 0.5)
    reporter.ready(8100)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"event": "progress", "text": "loading", "fraction": 0.5},
        {"event": "ready", "port": 8100},
    ]


def test_person_reads_each_step_once_and_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    """For a person: a line for each new step of the work on stderr, the address on stdout."""
    reporter = Reporter("worker", "0.0.0.0", supervised=False)
    for fraction in (0.1, 0.2):
        reporter.progress("loading", fraction)
    reporter.ready(8100)
    shown = capsys.readouterr()
    assert shown.err == "worker: loading\n"
    assert shown.out == "antiphon worker listens at http://127.0.0.1:8100\n"


def test_port_in_use_says_what_to_do() -> None:
    """A taken port becomes one sentence that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def listen() -> None:
            await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)

        with pytest.raises(BadRequest, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            run_process(listen(), "127.0.0.1", port, supervised=False)


def test_other_faults_are_not_dressed_up() -> None:
    """An OSError that has nothing to do with the address keeps its traceback."""

    async def fail() -> None:
        raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match="disk full"):
        run_process(fail(), "127.0.0.1", 1, supervised=False)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EACCES, "reserved for root"),
        (errno.EADDRNOTAVAIL, "cannot listen on 10.9.8.7: no such address"),
    ],
)
def test_reasons(number: int, text: str) -> None:
    """Each reason has its own words."""
    assert text in address_error(OSError(number, "no such address"), "10.9.8.7", 80).message
