"""How this process' allocator treats freed values: it keeps their memory for the next ones.

glibc gives large freed blocks back to the system, and the next value of the same size is paid for
with a page fault every 4 KiB: as dear as receiving it (docs/benchmarks.md, kv-wire). A worker's tiers
have byte budgets of their own, so what they let go they will want again.
"""

from __future__ import annotations

import ctypes
import platform

# mallopt's parameters, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MOST_MMAP_THRESHOLD = 32 * 2**20  # glibc takes no more
_NEVER = 2**31 - 1


def keep_freed() -> bool:
    """For this process, from now on; at its start, before threads. False where the libc cannot."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = {
        _MMAP_THRESHOLD: _MOST_MMAP_THRESHOLD,
        _TRIM_THRESHOLD: _NEVER,
        _ARENA_MAX: 1,  # further ones would give their memory back by their own rules
    }
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])
