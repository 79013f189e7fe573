"""How many cores this process may use, as far as the scheduler knows: container quotas are not in it."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores this process may run on, at least one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
