"""What a figure was measured on: CPU, cores, memory, versions, and whether the machine was busy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

_BUSY_SHARE = 0.15


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the software of a run."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    llama_cpp_python: str
    commit: str


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        llama_cpp_python=importlib.metadata.version("llama_cpp_python"),
        commit=_commit(),
    )


def warn_if_busy(seconds: float = 1.0) -> float:
    """The share of all cores that others use just now; says so on stderr when it is much."""
    psutil.cpu_percent(None)
    time.sleep(seconds)
    share = psutil.cpu_percent(None) / 100
    if share > _BUSY_SHARE:
        print(f"bench: WARNING: others use {share:.0%} of this machine; expect noise", file=sys.stderr)
    return share


def _cpu_model() -> str:
    """The model's name; where a virtual machine hides it, family and model numbers tell it."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def _commit() -> str:
    """Commit of the working tree, with '+' where it holds more than that."""
    root = Path(__file__).parent.parent
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True)
    return done.stdout.strip()
