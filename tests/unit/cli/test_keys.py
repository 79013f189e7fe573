"""`antiphon keys`, on real files."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.main import main
from antiphon.store.apikey import PREFIX


@pytest.fixture
def url(database_url: str) -> str:
    """A new database, of each kind."""
    return database_url


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["keys", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_key_alone_is_on_stdout(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`KEY=$(antiphon keys create)` holds the key and nothing else."""
    assert main(["keys", "create", "--database", url]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(PREFIX)
    assert printed.out.count("\n") == 1
    assert "of tenant local" in printed.err
    assert PREFIX not in printed.err


def test_life_of_a_key(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Created, listed without its secret, revoked, still listed."""
    options = ("--database", url)
    made = _json(capsys, "create", "--tenant", "acme", "--name", "web site", *options)
    key = made.pop("key")
    assert key.startswith(made["shown"])
    assert (made["tenant"], made["name"]) == ("acme", "web site")
    assert made["last_used_at"] is made["revoked_at"] is None
    assert _json(capsys, "list", *options) == [made]
    ended = _json(capsys, "revoke", made["id"], *options)
    assert ended["revoked_at"] is not None
    assert _json(capsys, "list", "--tenant", "acme", *options) == [ended]
    assert _json(capsys, "list", "--tenant", "other", *options) == []


def test_list_is_a_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a key, its cells under their heads; the words for people are on stderr."""
    assert main(["keys", "list", "--database", url]) == 0
    assert "no keys" in capsys.readouterr().err
    for name in ("one", "two"):
        main(["keys", "create", "--name", name, "--database", url])
    key = capsys.readouterr().out.splitlines()[0]
    assert main(["keys", "list", "--database", url]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    for row, name in zip(rows, ("one", "two"), strict=True):
        assert row.index(name) == head.index("NAME")
    assert rows[0].count(" -") == 2
    assert key not in rows[0]
    assert key[:16] in rows[0]


def test_grant_of_a_key(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All that a key may allow is said when it is made, listed, and changed piece by piece."""
    options = ("--database", url)
    limits = {
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "max_concurrent": 4,
        "tokens_per_day": 10**6,
        "tokens_per_month": 2**53 - 1,
    }
    said = [part for name, n in limits.items() for part in ("--" + name.replace("_", "-"), str(n))]
    models = ("--allow-model", "small", "--allow-model", "große/offene")
    made = _json(capsys, "create", *said, *models, "--priority", "batch", "--admin", *options)
    assert made["limits"] == limits
    assert made["models"] == ["small", "große/offene"]
    assert (made["priority"], made["is_admin"]) == ("batch", True)
    del made["key"]
    assert _json(capsys, "list", *options) == [made]
    change = ("change", made["id"], *options)
    made["limits"].pop("tokens_per_day")
    made["limits"]["max_concurrent"] = 5
    assert _json(capsys, *change, "--tokens-per-day", "none", "--max-concurrent", "5") == made
    assert _json(capsys, *change, "--allow-model", "small") == made | {"models": ["small"]}
    assert _json(capsys, *change, "--all-models") == made | {"models": None}
    changed = made | {"models": None, "is_admin": False, "priority": "default"}
    assert _json(capsys, *change, "--no-admin", "--priority", "default") == changed
    assert _json(capsys, "list", *options) == [changed]


def test_grants_are_listed_in_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """People read what a key allows in the table, and what it allows now after a change."""
    options = ("--database", url)
    main(["keys", "create", *options])
    made = ["--max-concurrent", "4", "--allow-model", "a", "--allow-model", "b", "--priority", "batch"]
    main(["keys", "create", *made, "--admin", *options])
    capsys.readouterr()
    assert main(["keys", "list", *options]) == 0
    head, plain, bound = capsys.readouterr().out.splitlines()
    at = head.index("ALLOWS")
    assert plain[at:] == "no limits"
    assert bound[at:] == "4 at once, only a b, class batch, admin"
    assert main(["keys", "change", bound.split()[0], "--tokens-per-minute", "7", *options]) == 0
    assert "allows now: 7 tokens/min, 4 at once, only a b, class batch, admin" in capsys.readouterr().out


def test_revoke_says_when_it_holds(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line says how long a running gateway may still take it."""
    made = _json(capsys, "create", "--database", url)
    assert main(["keys", "revoke", made["id"], "--database", url]) == 0
    assert "within 5 seconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["create", "extra"],
        ["create", "--ten", "acme"],
        ["revoke"],
        ["list", "--name", "x"],
        ["create", "--requests-per-minute", "0"],
        ["create", "--requests-per-minute", "many"],
        ["create", "--tokens-per-day", str(2**53)],
        ["create", "--priority", "urgent"],
        ["change", "--admin"],
        ["change", "key_0", "--all-models", "--allow-model", "a"],
        ["list", "--admin"],
    ],
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(["keys", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "--tenant", "No Such"], "no name for a tenant"),
        (["create", "--name", ""], "no name for a key"),
        (["revoke", "key_0"], "no key with the id"),
        (["change", "key_0", "--admin"], "no key with the id"),
        (["change", "key_0"], "say what to change"),
        (["create", "--allow-model", "a", "--allow-model", "a"], "named twice"),
    ],
)
def test_bad_values(url: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be done is said in one line, exit code 2, and nothing is done."""
    assert main(["keys", *arguments, "--database", url]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert _json(capsys, "list", "--database", url) == []


def test_bad_url(capsys: pytest.CaptureFixture[str]) -> None:
    """A URL of another kind is refused without being repeated: it may hold a password."""
    assert main(["keys", "list", "--database", "mysql://me:hush@host/db"]) == 2
    err = capsys.readouterr().err
    assert "write sqlite:///FILE" in err
    assert "hush" not in err


def test_locked_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that does not answer is named, with what it said; exit code 1."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    monkeypatch.setattr("antiphon.store.database._PATIENCE_S", 0.05)
    main(["keys", "list", "--database", url])
    holder = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert main(["keys", "create", "--database", url]) == 1
    holder.close()
    printed = capsys.readouterr()
    assert f"the database {url}: database is locked" in printed.err
    assert PREFIX not in printed.out


def test_default_database_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --database the keys are where `antiphon serve` looks for them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = _json(capsys, "create")
    assert (tmp_path / "antiphon" / "antiphon.db").is_file()
    assert [key["id"] for key in _json(capsys, "list")] == [made["id"]]
