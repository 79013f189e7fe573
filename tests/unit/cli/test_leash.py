"""A program that must not outlive its parent."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from antiphon.cli import leash

PATIENCE_S = 20.0
# A parent that starts a leashed sleeper, says its pid and waits.
_PARENT = """
import subprocess, sys
from antiphon.cli.leash import leashed
child = subprocess.Popen(leashed(["/bin/sleep", "1000"]))
while open(f"/proc/{child.pid}/comm").read().strip() != "sleep":
    assert child.poll() is None
print(child.pid, flush=True)
child.wait()
"""

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="the kernel's part of it is Linux'")


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_leashed_program_dies_with_its_parent(how: str) -> None:
    """SIGKILL of the parent, which it cannot see coming, ends the program too."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        sleeper = psutil.Process(int(parent.stdout.readline()))
        assert sleeper.is_running()
        getattr(parent, how)()
        psutil.wait_procs([sleeper], PATIENCE_S)
    assert not psutil.pid_exists(sleeper.pid) or sleeper.status() == psutil.STATUS_ZOMBIE


def test_program_keeps_pid_arguments_and_exit_code() -> None:
    """No process stands between: what the parent starts is the program itself."""
    code = "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)"
    command = leash.leashed([sys.executable, "-c", code, "--port", "0", "with space", ""])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    assert said == f"{process.pid} ['--port', '0', 'with space', '']\n"
    assert process.returncode == 7


def test_orphan_does_not_begin() -> None:
    """A parent that died before the wish was known leaves nothing running."""
    command = leash.leashed(["/bin/echo", "I run"])
    command[3] = "1"  # not our pid
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, b"")
