"""`antiphon worker` and `antiphon gateway` started by hand, as a fleet's operator does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

PATIENCE_S = 30.0


@contextmanager
def running(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[str]:
    """The URL of a process that listens inside the block, and stops in order after it."""
    stderr = log.open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "antiphon.cli.main", *arguments, "--port", "0", "--model", "scripted"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " listens at " in line
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
        stderr.close()


def _ask(gateway: str) -> httpx2.Response:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
    return httpx2.post(f"{gateway}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE_S)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file with a secret."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    return str(file)


def test_processes_started_by_hand_find_each_other(secret: str) -> None:
    """Two workers and a gateway that share a secret answer."""
    worker = ("worker", "--secret-file", secret)
    with running(*worker) as first, running(*worker) as second:
        urls = ("--worker", first, "--worker", second)
        with running("gateway", "--secret-file", secret, *urls) as gateway:
            until = time.monotonic() + PATIENCE_S
            while (response := _ask(gateway)).status_code == 503:
                assert time.monotonic() < until, "no worker"
                time.sleep(0.02)
            assert response.json()["choices"][0]["message"]["content"] == "Hello"


def test_gateway_with_another_secret_gets_no_worker(secret: str, tmp_path: Path) -> None:
    """A worker takes no work from who does not know its secret."""
    other = tmp_path / "other"
    other.write_text("fedcba9876543210")
    with (
        running("worker", "--secret-file", secret) as worker,
        running("gateway", "--secret-file", str(other), "--worker", worker, log=tmp_path / "log") as gateway,
    ):
        until = time.monotonic() + PATIENCE_S
        while "link.refused" not in (tmp_path / "log").read_text():
            assert time.monotonic() < until, "the worker was not asked"
            time.sleep(0.02)
        response = _ask(gateway)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_replica"


@pytest.mark.parametrize("command", ["worker", "gateway"])
def test_port_in_use_is_one_line(command: str, secret: str) -> None:
    """A process that cannot have its port says so and ends with 2."""
    with running("worker", "--secret-file", secret) as taken:
        port = taken.rpartition(":")[2]
        options = ["--worker", taken] if command == "gateway" else []
        command_line = [sys.executable, "-m", "antiphon.cli.main", command, "--model", "scripted"]
        done = subprocess.run(
            [*command_line, "--port", port, "--secret-file", secret, "--log-level", "error", *options],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
