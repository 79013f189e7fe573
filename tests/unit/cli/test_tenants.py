"""`antiphon tenants`, on real databases and a real store."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli import erase
from antiphon.cli.kvtenants import Tenants
from antiphon.cli.main import main
from antiphon.cli.state import standing_secret
from antiphon.kv.keys import block_key
from antiphon.store.tenants import Erasure, TenantStore
from antiphon.store.usage import Batch, Opening, UsageStore
from support.kvvalues import NAMESPACE, OTHER_NAMESPACE
from support.redisserver import RedisServer, redis_server

STRANGER = b"\x01\x02\x03\x04"


class _Person(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No gateway runs here that could notice; and a state folder of the test's own."""
    monkeypatch.setattr(erase, "WAIT_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file with the secret of scopes."""
    return tmp_path / "scope-secret"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A store."""
    with redis_server(unix=True) as made:
        yield made


def _json(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> Any:
    assert main([command, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _fill(server: RedisServer, secret: Path, tenant_id: str) -> set[str]:
    """Four blocks of this tenant, and two things that are not its; the keys of these."""
    tag = Tenants.tag_of_id(standing_secret(secret), tenant_id)
    theirs = [
        block_key(space, tag, bytes([n]) * 32) for space in (NAMESPACE, OTHER_NAMESPACE) for n in (1, 2)
    ]
    others = {block_key(NAMESPACE, STRANGER, b"\x01" * 32), "somebody else's"}
    with server.client() as client:
        client.mset(dict.fromkeys([*theirs, *others], b"value"))
    return others


def _left(server: RedisServer) -> set[str]:
    with server.client() as client:
        return {key.decode() for key in client.keys("*")}


def test_life_of_a_tenant(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Created, listed with its keys, erased, and known no more."""
    options = ("--database", database_url)
    made = _json(capsys, "tenants", "create", "acme", *options)
    assert (made["name"], made["num_keys"], made["num_revoked"]) == ("acme", 0, 0)
    key = _json(capsys, "keys", "create", "--tenant", "acme", *options)
    _json(capsys, "keys", "create", "--tenant", "acme", *options)
    _json(capsys, "keys", "revoke", key["id"], *options)
    acme, local = _json(capsys, "tenants", "list", *options)
    assert acme == made | {"num_keys": 1, "num_revoked": 1}
    assert local["id"] == "local"
    erased = _json(capsys, "tenants", "erase", "acme", "--yes", *options)
    assert erased["tenant_id"] == made["id"]
    assert erased["removed"] == {"usage": 0, "api_keys": 2}
    assert erased["num_blocks"] is erased["fault"] is None
    assert _json(capsys, "tenants", "list", *options) == [local]
    assert _json(capsys, "keys", "list", *options) == []
    assert main(["tenants", "erase", "acme", "--yes", *options]) == 2
    assert "there is no tenant 'acme'" in capsys.readouterr().err


def test_list_is_a_table(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a tenant, its cells under their heads."""
    main(["tenants", "create", "acme", "--database", database_url])
    assert "is tenant_" in capsys.readouterr().out
    assert main(["tenants", "list", "--database", database_url]) == 0
    printed = capsys.readouterr()
    head, acme, local = printed.out.splitlines()
    assert acme.index("acme") == local.index("local", 1 + local.index("local")) == head.index("TENANT")
    assert "keys create" in printed.err


def test_erasing_reaches_the_store(
    tmp_path: Path, server: RedisServer, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tenant's blocks of all namespaces go and are counted; those of others stay."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    made = _json(capsys, "tenants", "create", "acme", "--database", url)
    others = _fill(server, secret, made["id"])
    places = ("--database", url, "--scope-secret-file", str(secret), "--redis", server.url)
    assert main(["tenants", "erase", "acme", "--yes", *places]) == 0
    out = capsys.readouterr().out
    assert f"Erased acme ({made['id']})" in out
    assert "4 blocks of KV" in out
    assert _left(server) == others


def test_store_that_is_down_is_cleared_later(
    tmp_path: Path, server: RedisServer, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is gone, the exit code says that something is not, and the id that is shown goes on."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    made = _json(capsys, "tenants", "create", "acme", "--database", url)
    places = ("--database", url, "--scope-secret-file", str(secret), "--redis", server.url)
    server.kill()
    assert main(["tenants", "erase", "acme", "--yes", *places]) == 1
    again = f"antiphon tenants erase {made['id']}"
    assert again in capsys.readouterr().out
    server.start()
    others = _fill(server, secret, made["id"])
    erased = _json(capsys, *again.split()[1:], "--yes", *places)
    assert erased["num_blocks"] == 4
    assert _left(server) == others


@pytest.mark.parametrize(("typed", "is_erased"), [("acme\n", True), ("yes\n", False), ("", False)])
def test_name_is_typed_before_anything_goes(
    tmp_path: Path,
    typed: str,
    is_erased: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only the name itself; the question says how much there is."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    main(["keys", "create", "--tenant", "acme", "--database", url])
    monkeypatch.setattr(sys, "stdin", _Person(typed))
    assert main(["tenants", "erase", "acme", "--database", url]) == (0 if is_erased else 1)
    assert "1 keys" in capsys.readouterr().err
    assert len(_json(capsys, "keys", "list", "--database", url)) == (0 if is_erased else 1)


def test_nobody_to_ask_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a script it takes --yes."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    main(["tenants", "create", "acme", "--database", url])
    monkeypatch.setattr(sys, "stdin", io.StringIO("acme\n"))
    assert main(["tenants", "erase", "acme", "--database", url]) == 2
    assert "--yes" in capsys.readouterr().err
    assert len(_json(capsys, "tenants", "list", "--database", url)) == 2


def test_what_is_written_until_gateways_know_goes_too(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage of requests that came in the last seconds is swept, and counted with the rest."""
    real = TenantStore.erase

    async def erase_and_answer(self: TenantStore, tenant_id: str) -> Erasure:
        done = await real(self, tenant_id)
        values = {"gateway_id": "g", "model": "m", "endpoint": "e", "opened_at": done.erased_at}
        rows = [Opening(id=f"r{n}", tenant_id=tenant_id, key_id=None, **values) for n in range(2)]
        await UsageStore(self._database).write(Batch(openings=rows))
        return done

    monkeypatch.setattr(TenantStore, "erase", erase_and_answer)
    main(["tenants", "create", "acme", "--database", database_url])
    capsys.readouterr()
    erased = _json(capsys, "tenants", "erase", "acme", "--yes", "--database", database_url)
    assert erased["removed"] == {"usage": 2, "api_keys": 0}


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["create"], ["create", "a", "b"], ["erase"], ["list", "a"]]
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["tenants", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
