"""Runs a program that dies with its parent: `python -m antiphon.cli.leash PARENT COMMAND …`.

For programs that do not watch their stdin, as our own do (worker/lifeline.py). The kernel sends the
signal whatever ended the parent, SIGKILL included; the wish survives the exec, so that no process
stands between. Linux only. The signal comes when the parent's THREAD that started us ends: start
from the main one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
IS_SUPPORTED = sys.platform == "linux"


def leashed(command: Sequence[str]) -> list[str]:
    """The command line under which `command` dies with this process."""
    return [sys.executable, "-m", "antiphon.cli.leash", str(os.getpid()), *command]


def main(arguments: Sequence[str]) -> NoReturn:
    """Become the command. Raises OSError where that cannot be."""
    parent, *command = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # it died before the wish was known
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
