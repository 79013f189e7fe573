"""`antiphon kv clear` over a real store."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.kv.keys import block_key
from antiphon.kv.redisstore import open_store
from support.kvpages import local_tag
from support.kvvalues import NAMESPACE, OTHER_NAMESPACE
from support.redisserver import RedisServer, redis_cluster, redis_server

STRANGER = b"\x01\x02\x03\x04"


class _Person(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The tag of the tenant `local` of a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return local_tag(tmp_path)


@pytest.fixture
def server(local: bytes) -> Iterator[RedisServer]:
    """Two namespaces, two tenants, two blocks of each, and somebody else's key."""
    with redis_server(unix=True) as made:
        with made.client() as client:
            client.mset(_values(local) | {"other": b""})
        yield made


def _values(local: bytes) -> dict[str, bytes]:
    return {
        block_key(namespace, tag, bytes([number]) * 32): b"value"
        for namespace in (NAMESPACE, OTHER_NAMESPACE)
        for tag in (local, STRANGER)
        for number in (1, 2)
    }


def _left(server: RedisServer) -> set[str]:
    with server.client() as client:
        return {key.decode() for key in client.keys("*")}


@pytest.mark.parametrize(
    ("arguments", "num_deleted"),
    [
        (["--tenant", "local"], 4),
        (["--namespace", NAMESPACE.hex()], 4),
        (["--namespace", NAMESPACE.hex(), "--tenant", "local"], 2),
        (["--all"], 8),
    ],
)
def test_named_blocks_go_and_others_stay(
    arguments: list[str],
    num_deleted: int,
    server: RedisServer,
    local: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exactly those of the namespace, of the tenant, of both; never another one's key."""
    assert main(["kv", "clear", "--redis", server.url, *arguments, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"num_deleted": num_deleted}
    left = _left(server)
    assert "other" in left
    assert len(left) == 9 - num_deleted
    gone = {key for key in _values(local) if key not in left}
    assert "--namespace" not in arguments or all(NAMESPACE.hex() in key for key in gone)
    assert "--tenant" not in arguments or all(local.hex() in key for key in gone)


@pytest.mark.parametrize(
    ("answer", "code", "num_left"), [("y\n", 0, 1), ("n\n", 1, 9), ("\n", 1, 9), ("", 1, 9)]
)
def test_person_is_asked(
    answer: str,
    code: int,
    num_left: int,
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only a yes deletes; the question says what and where."""
    monkeypatch.setattr(sys, "stdin", _Person(answer))
    assert main(["kv", "clear", "--redis", server.url, "--all"]) == code
    assert len(_left(server)) == num_left
    assert f"Delete all blocks from {server.url.removeprefix('unix://')}?" in capsys.readouterr().err


def test_question_names_tenant_and_namespace(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a typing error is seen before it deletes."""
    monkeypatch.setattr(sys, "stdin", _Person("no\n"))
    arguments = ["--tenant", "local", "--namespace", NAMESPACE.hex()]
    assert main(["kv", "clear", "--redis", server.url, *arguments]) == 1
    assert f"of tenant local in namespace {NAMESPACE.hex()} from" in capsys.readouterr().err


def test_nobody_to_ask_is_a_refusal(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script must say --yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["kv", "clear", "--redis", server.url, "--all"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert len(_left(server)) == 9


@pytest.mark.parametrize("arguments", [[], ["--all", "--tenant", "local"]])
def test_what_to_clear_must_be_said_once(
    arguments: list[str], server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither nothing nor everything by accident."""
    assert main(["kv", "clear", "--redis", server.url, *arguments, "--yes"]) == 2
    assert "say which blocks" in capsys.readouterr().err
    assert len(_left(server)) == 9


def test_unknown_tenant_clears_nothing(server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and everything is still there."""
    assert main(["kv", "clear", "--redis", server.url, "--tenant", "lokal", "--yes"]) == 2
    assert "no tenant 'lokal'" in capsys.readouterr().err
    assert len(_left(server)) == 9


def test_all_shards_of_a_cluster_are_cleared(local: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """A tenant's blocks lie on every shard."""
    with redis_cluster() as cluster:
        store = open_store(cluster.url)
        for number in range(60):
            assert store.put(block_key(NAMESPACE, local, bytes([number]) * 32), b"value", 60_000, 10.0)
        store.close()
        assert all(_left(server) for server in cluster.servers)
        assert main(["kv", "clear", "--redis", cluster.url, "--tenant", "local", "--yes"]) == 0
        assert capsys.readouterr().out == "60 blocks deleted\n"
        assert [_left(server) for server in cluster.servers] == [set(), set(), set()]
