"""What `antiphon doctor` looks at, one function a question. Each answers with findings, never raises.

Invariants: nothing is changed or left behind; native code of llama.cpp runs in a process of its own,
because a build for another CPU dies of an illegal instruction. Files of /proc and /sys that are
missing (macOS) leave a question open, which is no fault.
"""

from __future__ import annotations

import importlib.metadata
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import AntiphonError
from antiphon.tokens.modelfile import GgufMetadata, context_of, locate, read_metadata

Level = Literal["ok", "warn", "fail"]

CGROUP = "/sys/fs/cgroup"
PACKAGES = ("llama-cpp-python", "msgspec", "starlette", "uvicorn", "websockets", "httpx2")
_REBUILD = "Build it for this CPU: rm -r .venv ~/.cache/antiphon/wheels && make setup"
_PROBE = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
_PROBE_TIMEOUT_S = 30.0
# Flags of /proc/cpuinfo that decide speed, and llama.cpp's names for what was built.
_FEATURES = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx_vnni": "AVX_VNNI",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}
_KV_BYTES = 2  # f16
_WEIGHTS_FACTOR = 3  # a tuned file may be this much larger than the one shipped
_PROCESSES_BYTES = 400 * 2**20  # gateway, worker and their libraries
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer: how bad, about what, what is so, and what to do about it."""

    level: Level
    subject: str
    text: str
    advice: str = ""


def check_versions() -> Iterator[Finding]:
    """Python, its environment and the packages that matter."""
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")
    if sys.prefix == sys.base_prefix:
        advice = "Run .venv/bin/antiphon, which `make setup` makes."
        yield Finding("warn", "environment", "not in a virtual environment", advice)
    for package in PACKAGES:
        try:
            yield Finding("ok", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", package, "not installed", "Install everything: make setup")


def check_llama(cpuinfo: str) -> Finding:
    """Whether llama.cpp loads here and uses what the CPU has. `cpuinfo`: text of /proc/cpuinfo."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", "llama.cpp", f"does not load within {_PROBE_TIMEOUT_S:g} s", _REBUILD)
    if probe.returncode == -signal.SIGILL:
        return Finding("fail", "llama.cpp", "was built for another CPU (illegal instruction)", _REBUILD)
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Finding("fail", "llama.cpp", f"does not load: {reason}", "Install everything: make setup")
    return compare_features(cpu_flags(cpuinfo), built_features(probe.stdout))


def compare_features(has: frozenset[str], built: frozenset[str]) -> Finding:
    """CPU features against those llama.cpp was built with."""
    wanted = {name for flag, name in _FEATURES.items() if flag in has}
    used = ", ".join(sorted(wanted & built)) or "no vector features we know"
    missing = sorted(wanted - built)
    if missing:
        text = f"built without {', '.join(missing)}, which this CPU has: slower than it could be"
        return Finding("warn", "llama.cpp", text, _REBUILD)
    return Finding("ok", "llama.cpp", f"loads; uses {used}")


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The feature flags in a text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def built_features(system_info: str) -> frozenset[str]:
    """The features named with 1 in llama.cpp's system info (`CPU : AVX2 = 1 | FMA = 1 | …`)."""
    pairs = (part.rpartition(":")[2].split("=") for part in system_info.split("|"))
    return frozenset(pair[0].strip() for pair in pairs if len(pair) == 2 and pair[1].strip() == "1")


def check_cores(num_usable: int, cpu_max: str) -> Finding:
    """Cores this process may use. `cpu_max`: text of the cgroup's cpu.max, empty where there is none."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(quota) < num_usable * int(period):
        cores = int(quota) / int(period)
        text = f"{num_usable} cores, but a container limit of {cores:g}"
        return Finding("warn", "cores", text, f"Say --threads {max(1, int(cores))}, or raise the limit.")
    if num_usable == 1:
        advice = "It works; with 2 cores or more the gateway does not take time from the model."
        return Finding("warn", "cores", "only one", advice)
    return Finding("ok", "cores", str(num_usable))


def check_model(entry: ModelEntry, max_sequences: int, available_bytes: int | None) -> Iterator[Finding]:
    """Whether the model's file is sound and fits into memory."""
    try:
        path = locate(entry)
        if path is None:
            yield Finding("ok", "model", f"{entry.name} needs no file")
            return
        metadata = read_metadata(path)
        context_tokens = context_of(entry)
    except AntiphonError as error:
        yield Finding("fail", "model", error.message, "Name another with --model, or run: make setup")
        return
    size = path.stat().st_size
    text = f"{entry.name}: {metadata.architecture}, {size // _MIB} MiB, context {context_tokens}"
    yield Finding("ok", "model", text)
    need = _WEIGHTS_FACTOR * size + _PROCESSES_BYTES
    need += kv_bytes_per_token(metadata) * context_tokens * max_sequences
    yield check_memory(need, available_bytes)


def kv_bytes_per_token(metadata: GgufMetadata) -> int:
    """Bytes of KV a token takes; 0 where the header does not say."""
    heads = metadata.num_heads or 0
    if not heads or not metadata.num_layers or not metadata.embedding_length:
        return 0
    head_dim = metadata.embedding_length // heads
    return 2 * metadata.num_layers * (metadata.num_kv_heads or heads) * head_dim * _KV_BYTES


def check_memory(need_bytes: int, available_bytes: int | None) -> Finding:
    """Whether one worker fits."""
    need = f"one worker takes up to {need_bytes // _MIB} MiB"
    if available_bytes is None:
        return Finding("ok", "memory", f"{need}; this system does not say how much is free")
    text = f"{need}, {available_bytes // _MIB} MiB are free"
    if available_bytes < need_bytes:
        return Finding("warn", "memory", text, "Lower --context or --max-sequences, or free some.")
    return Finding("ok", "memory", text)


def available_memory(meminfo: str, cgroup: Mapping[str, str]) -> int | None:
    """Bytes that can be had: what the system has free, within the container's limit.

    `cgroup`: texts of memory.max and memory.current by name, empty where there are none.
    """
    free: list[int] = []
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, used = cgroup.get("memory.max", "").strip(), cgroup.get("memory.current", "").strip()
    if limit.isdigit() and used.isdigit():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def read_available_memory() -> int | None:
    """Bytes that can be had on this system; None where it does not say."""
    cgroup = {name: read_text(f"{CGROUP}/{name}") for name in ("memory.max", "memory.current")}
    return available_memory(read_text("/proc/meminfo"), cgroup)


def check_port(host: str, port: int) -> Finding:
    """Whether `antiphon serve` could listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        text = f"{port} on {host} cannot be had: {error.strerror}"
        return Finding("warn", "port", text, "Stop what listens there, or choose another with --port.")
    return Finding("ok", "port", f"{port} on {host} is free")


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among them."""
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


def read_text(path: str) -> str:
    """A file of /proc or /sys, empty where it is not there."""
    try:
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""
