"""The folder where tuned weights lie: where it is, who may write, whether there is room, which CPU.

Shared by all workers of a machine (or of several, over a network home). Nothing here knows about
formats' speed or closeness; weights.py does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import llama_cpp

_BITS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5}  # a weight; other formats take less
_COARSER_BITS = 6.6
_DISK_RESERVE = 1.1  # of a file's size must be free to write it
_MEMORY_RESERVE = 1.5  # of a file's size must be available to serve it
_POLL_S = 0.2


class LockTimeout(Exception):
    """Another process has held the lock for too long."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/antiphon/weights`, by default under ~/.cache."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "antiphon" / "weights"


def cpu_identity() -> str:
    """Digest of what decides which kernels run here: CPU flags and llama.cpp's own view of them."""
    flags = platform.machine() + platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        flags += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    system = llama_cpp.llama_print_system_info()
    return hashlib.sha256(flags.encode() + b"\0" + system).hexdigest()[:16]


def room_for(format_name: str, num_params: int, folder: Path) -> None:
    """Raises OSError where a model of so many parameters finds no disk or no memory in this format."""
    num_bytes = int(num_params * _BITS.get(format_name, _COARSER_BITS) / 8)
    free = shutil.disk_usage(folder).free
    if free < _DISK_RESERVE * num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{format_name} needs {_mib(num_bytes)} MiB of disk, {_mib(free)} MiB are free",
            str(folder),
        )
    available = _available_memory_bytes()
    if available is not None and available < _MEMORY_RESERVE * num_bytes:
        raise OSError(
            errno.ENOMEM,
            f"{format_name} needs about {_mib(int(_MEMORY_RESERVE * num_bytes))} MiB of memory, "
            f"{_mib(available)} MiB are available",
        )


class Locked:
    """Holds a lock file for as long as the block runs. The kernel frees it when the process dies.

    `deed` says what its holder does: "tuning the weights".
    """

    def __init__(
        self, path: Path, deed: str, deadline_s: float, progress: Callable[[str, float], None]
    ) -> None:
        self._path = path
        self._deed = deed
        self._deadline_s = deadline_s
        self._progress = progress
        self._file = -1

    def __enter__(self) -> None:
        """Raises LockTimeout, or OSError where the folder cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    os.close(self._file)
                    raise LockTimeout(
                        f"another worker has been {self._deed} for {self._deadline_s:.0f} s ({self._path})"
                    ) from None
            self._progress(f"waiting for another worker that is {self._deed}", 0.05)
            time.sleep(_POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def _available_memory_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _mib(num_bytes: int) -> int:
    return num_bytes >> 20
