"""`antiphon kv stats` over a real store and pages of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.cli.kvstats import Group, grouped
from antiphon.cli.main import main
from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.kv.keys import BlockKey, block_key, scope_tag
from support.kvpages import SECRET, local_tag, make_info, worker_pages
from support.kvvalues import NAMESPACE, OTHER_NAMESPACE
from support.redisserver import redis_server

STRANGER = b"\x01\x02\x03\x04"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder of its own, no store in the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("ANTIPHON_REDIS_URL", raising=False)


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    """A file with the workers' secret."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return str(file)


def _key(number: int, tag: bytes = STRANGER, namespace: bytes = NAMESPACE) -> BlockKey:
    return BlockKey(namespace, tag, bytes([number]) * 32)


def test_blocks_are_summed_up_by_namespace_and_tenant() -> None:
    """Largest first; ranks of one block are values of their own."""
    sizes = {
        _key(1): 10,
        _key(2): 10,
        _key(2, b"tag2"): 1,
        _key(1, namespace=OTHER_NAMESPACE): 30,
        BlockKey(NAMESPACE, b"tag2", bytes(32), 1): 2,
    }
    names = {STRANGER: "acme", b"tag2": "zeta"}
    assert grouped(sizes, names.__getitem__) == [
        Group(OTHER_NAMESPACE.hex(), "acme", 1, 30),
        Group(NAMESPACE.hex(), "acme", 2, 20),
        Group(NAMESPACE.hex(), "zeta", 2, 3),
    ]
    assert grouped({}, names.__getitem__) == []


def test_report_names_tenants_and_hit_rates(
    secret_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person reads whose blocks there are and what share of prompts was found where."""
    local = local_tag(tmp_path)
    keys = [(local, 1), (local, 2), (scope_tag(PUBLIC_SCOPE), 3), (STRANGER, 4)]
    values = {block_key(NAMESPACE, tag, bytes([number]) * 32): bytes(2**20) for tag, number in keys}
    with redis_server(unix=True) as server, worker_pages(make_info()) as url:
        with server.client() as client:
            client.mset(values)
        arguments = ["--redis", server.url, "--worker", url, "--secret-file", secret_file]
        assert main(["kv", "stats", *arguments]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert main(["kv", "stats", *arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    namespace = NAMESPACE.hex()
    assert [namespace, "local", "2", "2.0", "MiB"] in lines
    assert [namespace, "(public)", "1", "1.0", "MiB"] in lines
    assert [namespace, STRANGER.hex(), "1", "1.0", "MiB"] in lines
    assert ["all", "4", "4.0", "MiB"] in lines
    assert [line for line in lines if "%" in str(line)][:2] == [
        ["engine", "10", "10%"],
        ["host", "20", "20%"],
    ]
    assert ["redis", "20", "20%"] in lines
    assert sum(group["num_blocks"] for group in report["store"]) == 4
    assert report["workers"][0]["stats"]["num_store"] == 20


def test_worker_that_is_silent_is_a_note(secret_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The store's table comes all the same; without either there is nothing to print."""
    away = ["--worker", "http://127.0.0.1:1", "--secret-file", secret_file]
    with redis_server(unix=True) as server:
        assert main(["kv", "stats", "--redis", server.url, *away]) == 0
    said = capsys.readouterr()
    assert "namespace" in said.out
    assert "antiphon kv stats: http://127.0.0.1:1/kv" in said.err
    assert main(["kv", "stats", *away]) == 2
    assert "neither a store nor a worker" in capsys.readouterr().err


def test_worker_alone_has_rates_to_show(secret_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a store the tiers of the worker are shown."""
    with worker_pages(make_info()) as url:
        assert main(["kv", "stats", "--worker", url, "--secret-file", secret_file]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no store\n")
    assert "saved about 1.5 s" in out


def test_store_that_is_away_is_one_line(secret_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and the reason."""
    with worker_pages(make_info()) as url:
        arguments = ["--redis", "redis://127.0.0.1:1", "--worker", url, "--secret-file", secret_file]
        assert main(["kv", "stats", *arguments]) == 1
    err = capsys.readouterr().err
    assert "antiphon kv stats: the store failed: unreachable" in err
    assert err.count("\n") == 1
