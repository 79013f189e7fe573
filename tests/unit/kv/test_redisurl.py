"""URLs of a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv.redisurl import Address, BadStoreUrl, Login, Mode, Tls, parse


def test_one_server() -> None:
    """Host, port and database, with defaults."""
    url = parse("redis://kv.internal")
    assert (url.mode, url.addresses, url.tls) == (Mode.SINGLE, (Address("kv.internal", 6379),), None)
    assert url.login == Login(None, None, 0)
    assert parse("redis://10.0.0.1:7000/3").login.db == 3
    assert parse("redis://[::1]:7000").addresses == (Address("::1", 7000),)


def test_login_is_percent_decoded() -> None:
    """A password may hold any sign; a user alone or a password alone is possible."""
    assert parse("redis://kv:p%40ss%2F%3A@host").login == Login("kv", "p@ss/:")
    assert parse("redis://:secret@host").login == Login(None, "secret")


def test_unix_socket() -> None:
    """The path of a socket, with login and database."""
    url = parse("unix://:secret@/run/redis%20kv.sock?db=2")
    assert url.addresses == (Address("/run/redis kv.sock", 0),)
    assert url.addresses[0].is_unix
    assert url.login == Login(None, "secret", 2)


def test_sentinels_and_their_master() -> None:
    """Several Sentinels, the master's name, and a password of the Sentinels' own."""
    url = parse("redis-sentinel://u:p@a,b:1/mymaster/4?sentinel_password=s")
    assert (url.mode, url.master) == (Mode.SENTINEL, "mymaster")
    assert url.addresses == (Address("a", 26379), Address("b", 1))
    assert (url.login, url.sentinel_login) == (Login("u", "p", 4), Login(None, "s"))


def test_cluster_over_tls() -> None:
    """Seeds of a cluster, and certificates."""
    url = parse("rediss-cluster://a:1,b:2?ca=/ca.pem&cert=/c.pem&key=/k.pem")
    assert (url.mode, url.addresses) == (Mode.CLUSTER, (Address("a", 1), Address("b", 2)))
    assert url.tls == Tls("/ca.pem", "/c.pem", "/k.pem")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("kv.internal:6379", "begins with redis://"),
        ("http://host", "begins with redis://"),
        ("redis://", "host is missing"),
        ("redis://host:port", "number from 1 to 65535"),
        ("redis://host:0", "number from 1 to 65535"),
        ("redis://host:65536", "number from 1 to 65535"),
        ("redis://host:p@ss@", "host is missing"),
        ("redis://[::1", "in brackets"),
        ("redis://host/zero", "database is a number"),
        ("redis://a,b", "several servers"),
        ("redis-cluster://host/1", "no databases"),
        ("redis-sentinel://host", "name of their master"),
        ("unix://relative/path", "absolute path"),
        ("unix://", "absolute path"),
        ("redis://host?ca=/ca.pem", "need rediss"),
        ("rediss://host?cert=/c.pem", "go together"),
        ("redis://host?timeout=5", "takes no timeout"),
    ],
)
def test_a_bad_url_says_why(url: str, reason: str) -> None:
    """Each mistake has its own sentence."""
    with pytest.raises(BadStoreUrl, match=reason):
        parse(url)


@given(text=st.text(max_size=40), scheme=st.sampled_from(["redis", "unix", "redis-sentinel", "rediss"]))
def test_no_text_but_a_url_passes(text: str, scheme: str) -> None:
    """Whatever stands behind the scheme, it is read or refused, and never repeated."""
    try:
        url = parse(f"{scheme}://user:hunter2@{text}")
    except BadStoreUrl as error:
        assert "hunter2" not in str(error)
    else:
        assert url.addresses


def test_secrets_stay_out_of_sight() -> None:
    """Neither str nor repr show a password."""
    url = parse("redis-sentinel://kv:hunter2@a,b/mymaster?sentinel_password=hunter3")
    assert "hunter" not in str(url) + repr(url)
    assert str(url) == "sentinel a:26379,b:26379 master mymaster"
    assert str(parse("rediss://[::1]")) == "[::1]:6379 (TLS)"
