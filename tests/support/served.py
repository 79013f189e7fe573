"""A real `antiphon serve` with its processes, for end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

SERVE = (sys.executable, "-m", "antiphon.cli.main", "serve")
PATIENCE_S = 40.0


@dataclass
class Served:
    """A running `antiphon serve`, ready or not."""

    process: subprocess.Popen[str]
    url: str = ""

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, command: str) -> psutil.Process:
        """The process that runs this command."""
        return next(c for c in self.children() if command in c.cmdline())

    def process_environ(self, name: str) -> str:
        """A variable of its environment."""
        return psutil.Process(self.process.pid).environ()[name]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def state_of_its_own() -> Iterator[dict[str, str]]:
    """An environment whose state is gone after the block, and without a Redis unless a test asks for one."""
    with tempfile.TemporaryDirectory(prefix="antiphon-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        none = {"ANTIPHON_REDIS_URL": "none", "ANTIPHON_CONTROL_REDIS_URL": "none"}
        yield os.environ | none | {"XDG_STATE_HOME": folder}


@contextmanager
def serving(*options: str, **environ: str) -> Iterator[Served]:
    """Serve inside the block; at its end every process that is left is killed, and was one too many.

    The state is the run's own, and there is no Redis, unless `environ` says otherwise.
    """
    with state_of_its_own() as base, _serving(options, base | environ) as served:
        yield served


@contextmanager
def _serving(options: Sequence[str], environ: Mapping[str, str]) -> Iterator[Served]:
    process = subprocess.Popen(
        [*SERVE, "--json", "--log-level", "warning", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        served = Served(process, json.loads(process.stdout.readline())["url"])
        family = served.children()
        yield served
    finally:
        for left in family:
            if left.is_running():
                left.kill()
        process.kill()
        process.communicate()
