"""URLs of databases: what they may say, and what of them is shown."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from antiphon.core.errors import BadRequest
from antiphon.store.databaseurl import PostgresUrl, SqliteUrl, Tls, parse
from support.redisserver import make_certificates


def _postgres(text: str) -> PostgresUrl:
    url = parse(text)
    assert isinstance(url, PostgresUrl)
    return url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys.db",
        "mysql://me:hush@h/d",
        "postgresql+psycopg://me:hush@h/d",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///a?mode=ro",
        "postgresql://me:hush@h",
        "postgresql://me:hush@/d",
        "postgresql://me:hush@h/d?host=/tmp",
        "postgresql://me:hush@h:port/d",
        "postgresql://me:hush@h:0/d",
        "postgresql://me:hush@h:65536/d",
        "postgresql://me:hush@/d?host=/tmp&port=٣",
        "postgresql://me:hush@h/d?options=-csearch_path%3Dx",
        "postgresql://me:hush@h/d?passfile=/etc/shadow",
        "postgresql://me:hush@h/d?sslmode=require",
        "postgresql://me:hush@h/d?sslmode=prefer",
        "postgresql://me:hush@h/d?sslmode=disable&sslrootcert=ca.pem",
        "postgresql://me:hush@h/d?sslcert=c.pem",
        "postgresql://me:hush@h/d?sslmode=disable&sslmode=verify-full",
        "postgresql://me:hush@127.0.0.1/d?sslrootcert=ca.pem",
        "postgresql://me:hush@/d?host=/tmp&sslmode=verify-full",
    ],
)
def test_urls_that_are_none(text: str) -> None:
    """What is not ours, or would be half a promise, is refused without being repeated."""
    with pytest.raises(BadRequest) as caught:
        parse(text)
    assert "hush" not in str(caught.value)
    assert "hush" not in str(caught.value.__context__ or "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:hush@h/d", "postgresql://me:***@h/d"),
        ("postgres://me:hush@h:5433/d?sslmode=disable", "postgresql://me:***@h:5433/d"),
        ("postgresql://me@[::1]/d", "postgresql://me@[::1]/d"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://me:hush@/d?host=/run/pg", "postgresql://me:***@/d?host=/run/pg"),
        ("postgresql://me:hush@/d?host=/run/pg&port=77", "postgresql://me:***@:77/d?host=/run/pg"),
        ("sqlite:////var/keys.db", "sqlite:////var/keys.db"),
    ],
)
def test_urls_are_shown_without_passwords(text: str, shown: str) -> None:
    """All but the password says which database it is."""
    assert str(parse(text)) == shown
    assert "hush" not in repr(parse(text))


@pytest.mark.parametrize("file", [Path("a b?c=d#e%20.db"), Path("/var/lib/köln.db"), Path("-")])
def test_any_file_has_a_url(file: Path) -> None:
    """Signs that mean something in a URL are part of the file's name all the same."""
    assert parse(str(SqliteUrl(file))) == SqliteUrl(file)


@pytest.mark.parametrize(
    ("text", "tls"),
    [
        ("postgresql://127.0.0.1/d", None),
        ("postgresql://localhost/d", None),
        ("postgresql://[::1]/d", None),
        ("postgresql:///d?host=/run/pg", None),
        ("postgresql://h/d?sslmode=disable", None),
        ("postgresql://h/d", Tls()),
        ("postgresql://10.0.0.7/d", Tls()),
        ("postgresql://localhost.evil.example/d", Tls()),
        ("postgresql://localhost/d?sslmode=verify-full", Tls()),
        ("postgresql://h/d?sslrootcert=ca&sslcert=c&sslkey=k", Tls("ca", "c", "k")),
    ],
)
def test_tls_is_what_happens_beyond_this_machine(text: str, tls: Tls | None) -> None:
    """Without a word on it servers elsewhere must prove who they are; only `disable` says otherwise."""
    assert _postgres(text).tls == tls


def test_context_checks_the_server(tmp_path: Path) -> None:
    """Certificate and name are both checked, and our own certificate is there to be shown."""
    made = make_certificates(tmp_path)
    context = Tls(str(made.ca), str(made.certificate), str(made.key)).context()
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"] == 1


def test_certificates_that_are_none(tmp_path: Path) -> None:
    """Files that are not there, or hold something else, are said before anything connects."""
    with pytest.raises(BadRequest, match="No such file"):
        Tls(str(tmp_path / "none")).context()
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(BadRequest, match="certificates cannot be read"):
        Tls(str(tmp_path / "text")).context()
