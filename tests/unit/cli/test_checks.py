"""The doctor's questions."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.cli import checks
from antiphon.cli.checks import Finding
from antiphon.core.catalogue import ModelEntry

GIB = 2**30
CPUINFO = "processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512_bf16\nbugs\t\t:\n"


def test_versions_of_this_environment_are_found() -> None:
    """Where the tests run, everything is installed."""
    findings = list(checks.check_versions())
    assert {f.subject for f in findings if f.level == "ok"} >= {"python", *checks.PACKAGES}


def test_missing_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not there is named, with the way to get it."""
    monkeypatch.setattr(checks, "PACKAGES", ("no-such-package",))
    finding = list(checks.check_versions())[-1]
    assert (finding.level, finding.subject) == ("fail", "no-such-package")
    assert "make setup" in finding.advice


def test_llama_of_this_environment_loads() -> None:
    """The build that the tests use is none for another CPU."""
    finding = checks.check_llama(checks.read_text("/proc/cpuinfo"))
    assert finding.level != "fail"


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "another CPU"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_llama_that_does_not_load_is_a_failure(
    probe: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal instruction does not take the doctor with it; other reasons are shown."""
    monkeypatch.setattr(checks, "_PROBE", probe)
    finding = checks.check_llama("")
    assert finding.level == "fail"
    assert text in finding.text


def test_llama_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that does not end is one, too."""

    def hang(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired(sys.executable, 30)

    monkeypatch.setattr(subprocess, "run", hang)
    assert checks.check_llama("").level == "fail"


def test_features_are_read() -> None:
    """Both sides are read in their own spelling."""
    assert checks.cpu_flags(CPUINFO) == {"fpu", "avx2", "fma", "avx512f", "avx512_bf16"}
    assert checks.cpu_flags("") == frozenset()
    built = checks.built_features("CPU : AVX2 = 1 | FMA = 1 | AVX512 = 0 | REPACK = 1 | ")
    assert built == {"AVX2", "FMA", "REPACK"}


def test_build_that_leaves_features_unused_is_slow() -> None:
    """What the CPU has and the build has not is named."""
    finding = checks.compare_features(checks.cpu_flags(CPUINFO), frozenset({"AVX2", "FMA"}))
    assert finding.level == "warn"
    assert "AVX512, AVX512_BF16" in finding.text
    assert "make setup" in finding.advice


def test_build_that_uses_all_features_is_good() -> None:
    """Flags that do not matter are not asked for."""
    built = frozenset({"AVX2", "FMA", "AVX512", "AVX512_BF16", "REPACK"})
    assert checks.compare_features(checks.cpu_flags(CPUINFO), built).level == "ok"


@pytest.mark.parametrize(
    ("num_usable", "cpu_max", "level"),
    [
        (4, "", "ok"),
        (4, "max 100000\n", "ok"),
        (4, "400000 100000\n", "ok"),
        (4, "150000 100000\n", "warn"),
        (1, "", "warn"),
        (2, "nonsense", "ok"),
    ],
)
def test_cores(num_usable: int, cpu_max: str, level: str) -> None:
    """A container's limit counts more than the cores one sees."""
    assert checks.check_cores(num_usable, cpu_max).level == level


@pytest.mark.parametrize(
    ("meminfo", "cgroup", "bytes_"),
    [
        ("MemTotal: 9 kB\nMemAvailable: 1024 kB\n", {}, 2**20),
        ("MemAvailable: 1024 kB\n", {"memory.max": "max\n", "memory.current": "5\n"}, 2**20),
        ("MemAvailable: 1024 kB\n", {"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ("", {"memory.max": "1000", "memory.current": "1400"}, 0),
        ("", {}, None),
    ],
)
def test_available_memory(meminfo: str, cgroup: dict[str, str], bytes_: int | None) -> None:
    """The tighter of system and container decides; where neither says, nobody knows."""
    assert checks.available_memory(meminfo, cgroup) == bytes_


def test_memory_that_does_not_suffice_is_warned_of() -> None:
    """The finding says how much is missing and how to need less."""
    finding = checks.check_memory(2 * GIB, GIB)
    assert finding.level == "warn"
    assert "2048 MiB" in finding.text
    assert "--context" in finding.advice
    assert checks.check_memory(GIB, 2 * GIB).level == "ok"
    assert checks.check_memory(GIB, None).level == "ok"


@pytest.mark.model
def test_built_in_model_is_sound_and_its_kv_is_counted(model_path: Path) -> None:
    """The header gives the KV size that engine figures were made with: 30 layers, 3 heads of 64, K and V."""
    entry = ModelEntry(name="m", file=str(model_path), context=4096)
    file, memory = checks.check_model(entry, 8, 64 * GIB)
    assert (file.level, memory.level) == ("ok", "ok")
    assert checks.kv_bytes_per_token(checks.read_metadata(model_path)) == 23_040
    assert [f.level for f in checks.check_model(entry, 8, GIB // 2)] == ["ok", "warn"]


def test_broken_model_file_is_a_failure(tmp_path: Path) -> None:
    """A file that is no GGUF is said to be none, and memory is not asked about."""
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + b"\xff" * 100)
    (finding,) = checks.check_model(ModelEntry(name="x", file=str(file)), 8, None)
    assert finding.level == "fail"
    assert "x.gguf" in finding.text


def test_scripted_model_needs_nothing() -> None:
    """A model without weights is no question of memory."""
    (finding,) = checks.check_model(ModelEntry(name="s", engine="scripted"), 8, 0)
    assert finding.level == "ok"


def test_port() -> None:
    """A port that is taken is said to be; one that was let go is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert checks.check_port("127.0.0.1", port).level == "warn"
    assert checks.check_port("127.0.0.1", port).level == "ok"


@pytest.mark.parametrize(
    ("levels", "worst"), [([], "ok"), (["ok", "warn", "ok"], "warn"), (["warn", "fail", "ok"], "fail")]
)
def test_worst(levels: list[checks.Level], worst: str) -> None:
    """One bad finding is enough."""
    assert checks.worst([Finding(level, "s", "t") for level in levels]) == worst


def test_missing_files_are_empty() -> None:
    """Other systems have no /proc."""
    assert checks.read_text("/no/such/file") == ""
