"""Freed values' memory stays with the process: in a process of its own, for it cannot be undone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Frees and takes 64 MiB in values again and again, on the main thread and on another; page faults a turn.
_PROGRAM = """
import resource, threading
from antiphon.kv.heap import keep_freed

def turn():
    values = [b"x" * (4 << 20) for _ in range(16)]

def faults():
    turn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        turn()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)

kept = {keep}
faults()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(int(kept))
"""


def page_faults(keep: str) -> tuple[int, int]:
    """Of a turn on the main thread, and on another one."""
    program = _PROGRAM.replace("{keep}", keep)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    main, other, kept = map(int, done.stdout.split())
    assert kept == (keep != "False")
    return main, other


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator's settings are glibc's")
def test_memory_is_not_paid_for_twice() -> None:
    """Without it, values cost thousands of page faults each time; with it, hardly any."""
    assert max(page_faults("False")) > 4000
    assert max(page_faults("keep_freed()")) < 400
