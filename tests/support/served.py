"""A real `antiphon serve` with its processes, for end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(*options: str, **environ: str) -> Iterator[Served]:
    """Serve inside the block; at its end every process that is left is killed, and was one too many."""
    process = subprocess.Popen(
        [*SERVE, "--json", "--log-level", "warning", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environ,
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
