"""A process that ends when the one which started it is gone, whatever killed that one.

The parent holds the write end of the child's stdin; the system closes it with the parent, even on
SIGKILL. The child then asks itself to stop, as a terminal would, and after `GRACE_S` stops asking.
A thread, not the event loop: it must work when the loop is stuck.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

GRACE_S = 5.0


def follow_parent() -> None:
    """Tie this process's life to its stdin."""
    threading.Thread(target=_wait_for_end, args=(sys.stdin.fileno(),), name="lifeline", daemon=True).start()


def _wait_for_end(stdin: int) -> None:
    while os.read(stdin, 4096):
        pass  # nothing is ever said on it
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
