"""The peers: finding them, and putting them into the cache folder.

They live in ~/.cache/antiphon/peers, outside the project and outside its environment: LiteLLM brings
half a gigabyte and pins of its own, and llama-server is a build of the very llama.cpp source that the
installed llama-cpp-python was made of, so that both sides of a bench run the same kernels.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BenchFault

LITELLM_VERSION = "1.108.7"
_LLAMA_SERVER_ENV = "ANTIPHON_BENCH_LLAMA_SERVER"
_CMAKE_FLAGS = (
    "-GNinja",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_CURL=OFF",
)
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # as build-llama.cmake, and for its reason


def cache_folder() -> Path:
    """Where peers are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "antiphon" / "peers"


def llama_version() -> str:
    """Version of llama-cpp-python, whose llama.cpp both sides run."""
    return importlib.metadata.version("llama_cpp_python")


def find_llama_server(given: str | None) -> Path:
    """The llama-server binary: the given path, the environment's, or the built one."""
    named = given or os.environ.get(_LLAMA_SERVER_ENV)
    path = Path(named) if named else cache_folder() / "llama-server" / "llama-server"
    if not path.is_file():
        raise BenchFault(
            f"there is no llama-server at {path}. Build it (about 10 minutes on 2 cores) with\n"
            f"  python -m bench peers llama-server\n"
            f"or name one with --llama-server PATH or {_LLAMA_SERVER_ENV}"
        )
    return path


def find_litellm() -> Path:
    """The LiteLLM command in its own environment."""
    path = cache_folder() / "litellm" / "bin" / "litellm"
    if not path.is_file():
        raise BenchFault(f"there is no LiteLLM at {path}. Install it with\n  python -m bench peers litellm")
    return path


def install(name: str) -> Path:
    """Build or install a peer, if it is not there yet; returns its command."""
    target = cache_folder() / name
    stamp = target / "antiphon-peer.txt"
    version = llama_version() if name == "llama-server" else LITELLM_VERSION
    if not stamp.is_file() or stamp.read_text().strip() != version:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        if name == "llama-server":
            _build_llama_server(version, target)
        else:
            _install_litellm(target)
        stamp.write_text(version + "\n")
    return find_llama_server(None) if name == "llama-server" else find_litellm()


def _build_llama_server(version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="antiphon-peer-") as folder:
        work = Path(folder)
        print(f"peers: fetching the source of llama-cpp-python {version}", file=sys.stderr)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        _call([*fetch, "-d", folder, f"llama-cpp-python=={version}"])
        with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
        flags = [*_CMAKE_FLAGS]
        if platform.machine() in ("x86_64", "AMD64"):
            flags += [f"-DCMAKE_C_FLAGS={_NO_AMX}", f"-DCMAKE_CXX_FLAGS={_NO_AMX}"]
        _call(["cmake", "-S", str(source), "-B", f"{folder}/build", *flags])
        print("peers: building llama-server (about 10 minutes on 2 cores)", file=sys.stderr)
        _call(["cmake", "--build", f"{folder}/build", "--target", "llama-server"])
        for file in (work / "build" / "bin").iterdir():
            shutil.copy2(file, target / file.name, follow_symlinks=True)


def _install_litellm(target: Path) -> None:
    print(f"peers: installing LiteLLM {LITELLM_VERSION} into {target} (about 730 MB)", file=sys.stderr)
    venv.create(target, with_pip=True)
    _call([str(target / "bin" / "pip"), "install", "--quiet", f"litellm[proxy]=={LITELLM_VERSION}"])


def _call(argv: Sequence[str]) -> None:
    """Run a tool with its output on our standard error, which is where progress goes."""
    try:
        subprocess.run(argv, check=True, stdout=sys.stderr)
    except FileNotFoundError as error:
        raise BenchFault(f"{argv[0]!r} is not installed, and building a peer needs it") from error
    except subprocess.CalledProcessError as error:
        raise BenchFault(f"{argv[0]} failed with status {error.returncode}, see above") from error
