"""A process that ends with its parent."""

from __future__ import annotations

import signal
import subprocess
import sys

_HEAD = "import sys, threading, signal; from antiphon.worker import lifeline; "


def _start(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HEAD + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def _cut(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    return process.wait(20)


def test_process_stops_when_stdin_closes() -> None:
    """The end of stdin is a request to stop."""
    process = _start("lifeline.follow_parent(); print('up', flush=True); threading.Event().wait()")
    assert _cut(process) == -signal.SIGTERM


def test_process_that_ignores_the_request_is_ended() -> None:
    """A process whose loop is stuck ends all the same, after the grace period."""
    process = _start(
        "lifeline.GRACE_S = 0.05; signal.signal(signal.SIGTERM, lambda *_: None); lifeline.follow_parent(); "
        "print('up', flush=True)\nwhile True: threading.Event().wait()"
    )
    assert _cut(process) == -signal.SIGKILL


def test_process_lives_while_stdin_is_open() -> None:
    """What is written on stdin means nothing; only its end does."""
    process = _start(
        "lifeline.follow_parent(); print('up', flush=True); print('on', flush=True); threading.Event().wait()"
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"anything\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"on\n"
    assert process.poll() is None
    _cut(process)
