"""A real `antiphon worker` process, for tests in which workers are many, of roles, or die."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SECRET = "a secret of these tests, long enough for all"


@dataclass
class WorkerProcess:
    """A worker that answers."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def worker_processes(environ: Mapping[str, str], *commands: tuple[str, ...]) -> Iterator[list[WorkerProcess]]:
    """Workers with these options, started together; killed at the end of the block.

    `environ` holds the state folder, which they share, and by it the keys of their store.
    """
    secret = Path(environ["XDG_STATE_HOME"]) / "secret-of-workers"
    secret.touch(0o600)
    secret.write_text(SECRET)
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_started(environ, secret, options)) for options in commands]
        yield [WorkerProcess(process, _port_of(process)) for process in started]


@contextlib.contextmanager
def _started(
    environ: Mapping[str, str], secret: Path, options: tuple[str, ...]
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "antiphon.cli.main", "worker", "--supervised", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--log-level", "error", "--secret-file", str(secret), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            return int(event["port"])
    raise AssertionError(f"the worker ended with {process.wait()}")
