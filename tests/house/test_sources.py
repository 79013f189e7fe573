"""House rules on Python files that ruff and mypy cannot check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.sources import ROOT, called, functions, name_of, python_files, tree_of

PRODUCT = python_files("src", "bench", "scripts")
TESTS = python_files("tests")
MAX_LINES = 400

# Where anything may be caught: each logs and re-raises or answers.
CATCHERS = {
    "src/antiphon/gateway/middleware.py",  # a fault of ours is logged and answered
    "src/antiphon/gateway/admission.py",  # what a start raises goes to the request that waited for it
    "src/antiphon/router/link.py",  # a fault costs one connection, not the gateway
    "src/antiphon/kv/fetcher.py",  # a fault of ours costs a fetch, not the thread
    "src/antiphon/kv/writer.py",  # nor the writer's
    "src/antiphon/worker/kvbridge.py",  # a tier that breaks costs reuse, not answers
    "src/antiphon/worker/lease.py",  # a fault of ours costs a beat, not the lease
    "src/antiphon/router/registry.py",  # nor the gateway
    "src/antiphon/worker/enginethread.py",  # the engine thread dies: every answer ends, the process is told
}
# Where **keywords stand for a foreign signature.
FORWARDERS = {"src/antiphon/tokens/sandbox.py"}  # jinja2's
# Commands read the environment and argv; so do modules that are a process of their own, and the one that
# tells what llama.cpp has read there itself.
RIM = {"src/antiphon/worker/trial.py", "src/antiphon/engine/llama.py"}
# Unit tests of something that several modules do together.
TOPICS = {
    "engine/test_load.py",
    "engine/test_offers.py",
    "engine/test_prefill_only.py",
    "router/test_faults.py",
    "router/test_hangs.py",
    "router/test_hedges.py",
    "router/test_overload.py",
    "gateway/test_chunks.py",
    "gateway/test_envelope.py",
    "gateway/test_logprob_shapes.py",
    "gateway/test_wishes.py",
    "bench/test_bench_parts.py",
    "bench/test_bench_kv.py",
}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "telnetlib", "requests", "httpx"}
BANNED_CALLS = {"eval", "exec", "compile", "yaml.load", "os.system", "os.popen", "subprocess.getoutput"}


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_file_is_short(path: Path) -> None:
    """A file that does not fit is cut wrong."""
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=name_of)
def test_file_says_what_it_owns(path: Path) -> None:
    """Every module begins with a docstring."""
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize("path", [p for p in TESTS if p.name.startswith("test_")], ids=name_of)
def test_tests_say_what_they_promise(path: Path) -> None:
    """Every test has a docstring."""
    silent = [f.name for f in functions(path) if f.name.startswith("test_") and not ast.get_docstring(f)]
    assert silent == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_nothing_dangerous_is_called(path: Path) -> None:
    """No pickle and its kin, no evaluated text, no shell."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & BANNED_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in BANNED_MODULES
        elif isinstance(node, ast.Call):
            assert called(node) not in BANNED_CALLS
            assert not any(keyword.arg == "shell" for keyword in node.keywords)


@pytest.mark.parametrize("path", python_files("src"), ids=name_of)
def test_broad_excepts_stand_in_few_places(path: Path) -> None:
    """Only the named files may catch everything."""
    broad = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
    ]
    assert bool(broad) == (name_of(path) in CATCHERS)


@pytest.mark.parametrize("path", python_files("src"), ids=name_of)
def test_no_keyword_plumbing(path: Path) -> None:
    """Parts hand each other named things, not **keywords."""
    plumbing = [f.name for f in functions(path) if f.args.kwarg is not None]
    assert bool(plumbing) == (name_of(path) in FORWARDERS)


@pytest.mark.parametrize("path", python_files("src"), ids=name_of)
def test_abstractions_are_not_asked_what_they_are(path: Path) -> None:
    """`hasattr` and `getattr` with a made-up name belong to foreign objects only."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and called(node) == "hasattr":
            assert ast.unparse(node.args[0]) in {"os"}


@pytest.mark.parametrize("path", python_files("src"), ids=name_of)
def test_environment_is_read_at_the_rim(path: Path) -> None:
    """Only commands read the environment; everything else is handed what it needs."""
    used = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    if path.parent.name != "cli" and name_of(path) not in RIM:
        assert not used & {"os.environ", "os.getenv", "sys.argv"}


UNIT_TESTS = [path for path in TESTS if "unit" in path.parts and path.name.startswith("test_")]


@pytest.mark.parametrize("path", UNIT_TESTS, ids=name_of)
def test_unit_tests_mirror_the_sources(path: Path) -> None:
    """tests/unit/engine/test_blocks.py tests src/antiphon/engine/blocks.py."""
    package = path.parent.name
    folder = ROOT / "bench" if package == "bench" else ROOT / "src" / "antiphon" / package
    module = path.name.removeprefix("test_").removeprefix("bench_")
    assert folder.is_dir()
    assert (folder / module).is_file() or f"{package}/{path.name}" in TOPICS


def test_named_places_are_there() -> None:
    """The lists above name no file that is gone."""
    unit = {f"tests/unit/{topic}" for topic in TOPICS}
    assert {name for name in CATCHERS | FORWARDERS | RIM | unit if not (ROOT / name).is_file()} == set()
