"""Where commands find the database, the secret and the public prefixes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from antiphon.cli import database, options
from antiphon.cli.main import main
from antiphon.core.errors import BadRequest, StoreUnavailable


def _args(*arguments: str) -> argparse.Namespace:
    parser = options.CommandParser("antiphon test", description="d", epilog="e")
    options.add_listen_options(parser, 8000)
    options.add_proxy_option(parser)
    database.add_database_option(parser)
    database.add_scope_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a state folder of its own."""
    return {"XDG_STATE_HOME": str(tmp_path)}


def test_defaults_lie_in_the_state_folder(tmp_path: Path, environ: dict[str, str]) -> None:
    """The database's URL and the secret's file; the secret is the same the next time."""
    folder = tmp_path / "antiphon"
    assert database.database_of(_args(), environ) == f"sqlite:///{folder / 'antiphon.db'}"
    secret = database.scope_secret_of(_args(), environ)
    assert database.scope_secret_of(_args(), environ) == secret
    assert (folder / "scope-secret").read_text().strip() == secret.hex()


def test_named_places_win(tmp_path: Path) -> None:
    """What options name is used, and no state folder is needed."""
    file = tmp_path / "elsewhere"
    args = _args("--database", "sqlite:///x.db", "--scope-secret-file", str(file))
    assert database.database_of(args, {}) == "sqlite:///x.db"
    assert database.scope_secret_of(args, {}).hex() == file.read_text().strip()


def test_environment_names_the_database(environ: dict[str, str]) -> None:
    """A URL with a password need not stand on a command line; an option wins over it."""
    environ[database.DATABASE_VARIABLE] = "postgresql://me:hush@db/keys"
    assert database.database_of(_args(), environ) == "postgresql://me:hush@db/keys"
    assert database.said_database(_args("--database", "sqlite:///x.db"), environ) == "sqlite:///x.db"
    environ[database.DATABASE_VARIABLE] = "mysql://me:hush@db/keys"
    with pytest.raises(BadRequest, match=r"\$ANTIPHON_DATABASE_URL: ") as caught:
        database.database_of(_args(), environ)
    assert "hush" not in caught.value.message
    environ[database.DATABASE_VARIABLE] = ""
    assert database.said_database(_args(), environ) is None


def test_options_survive_the_way_to_a_gateway() -> None:
    """What `serve` is told is what its gateway is told; what it is not told stays unsaid."""
    given = ["--scope-secret-file", "s", "--public-prefix-file", "p"]
    args = _args(*given)
    assert _args(*database.gateway_arguments(args)) == args
    assert database.gateway_arguments(_args()) == []


def test_database_goes_to_a_gateway_by_its_environment() -> None:
    """Everybody may read the command line of a gateway, and the URL may hold a password."""
    url = "postgresql://me:hush@db/keys"
    args = _args("--database", url)
    assert database.gateway_arguments(args) == []
    handed = database.gateway_environ(args, {})
    assert database.database_of(_args(), handed) == url
    assert database.gateway_environ(_args(), {}) == {}


def test_passwords_are_not_told() -> None:
    """What is said of a database that does not answer names it without its password."""
    with pytest.raises(StoreUnavailable) as caught, database.told("postgresql://me:hush@db/keys"):
        raise StoreUnavailable("no", detail="it is down")
    assert caught.value.message == "the database postgresql://me:***@db/keys: it is down"


def _prefix_file(tmp_path: Path, text: str) -> argparse.Namespace:
    file = tmp_path / "public.toml"
    file.write_text(text, "utf-8")
    return _args("--public-prefix-file", str(file))


def test_public_prefixes(tmp_path: Path) -> None:
    """System prompts in order, with their line ends as they stand; none without a file."""
    args = _prefix_file(tmp_path, '[[prefix]]\nsystem = "A"\n[[prefix]]\nsystem = """\nB\nC"""\n')
    assert database.public_systems_of(args) == ("A", "B\nC")
    assert database.public_systems_of(_args()) == ()
    assert database.public_systems_of(_prefix_file(tmp_path, "")) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[prefix]]", "system"),
        ("[[prefix]]\nsystem = 1", "system"),
        ("[[prefix]]\nsystem = 'a'\nmodel = 'm'", "model"),
        ("[[prefixes]]\nsystem = 'a'", "prefixes"),
        ("prefix = 'a'", "prefix"),
        ("[[prefix", "end of an array"),
        ("[[prefix]]\nsystem = ''\n" * 257, "more than 256"),
    ],
)
def test_prefix_files_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    """A mistake is said, not skipped: a prefix that is not public costs time unnoticed."""
    with pytest.raises(BadRequest, match=words) as caught:
        database.public_systems_of(_prefix_file(tmp_path, text))
    assert "public.toml" in caught.value.message


def test_prefix_file_that_is_not_there(tmp_path: Path) -> None:
    """Said with its name."""
    with pytest.raises(BadRequest, match="No such file"):
        database.public_systems_of(_args("--public-prefix-file", str(tmp_path / "none")))


def test_other_hosts_need_keys_first(environ: dict[str, str], tmp_path: Path) -> None:
    """The check before anything is loaded: refused without keys, fine with one, revoked or not."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    args = _args("--host", "0.0.0.0", "--database", url)
    with pytest.raises(BadRequest, match="antiphon keys create"):
        database.check_gateway(args, environ)
    database.check_gateway(_args("--host", "0.0.0.0", "--database", url, "--behind-proxy"), environ)
    database.check_gateway(_args("--host", "0.0.0.0", "--database", url, "--require-key"), environ)
    main(["keys", "create", "--database", url])
    database.check_gateway(args, environ)


def test_loopback_needs_no_database_yet(environ: dict[str, str], tmp_path: Path) -> None:
    """On loopback the check leaves the database to the gateway."""
    database.check_gateway(_args("--database", f"sqlite:///{tmp_path / 'none' / 'keys.db'}"), environ)


def test_broken_database_is_told(environ: dict[str, str], tmp_path: Path) -> None:
    """The error names the database and what it said."""
    url = f"sqlite:///{tmp_path / 'none' / 'keys.db'}"
    with pytest.raises(StoreUnavailable, match="No such file") as caught:
        database.check_gateway(_args("--host", "0.0.0.0", "--database", url), environ)
    assert url in caught.value.message
