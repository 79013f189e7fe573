"""Client tokens: what is sealed comes back, and nothing else is ever read."""

from __future__ import annotations

import base64
import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import FULL_GRANT, Grant, Limits
from antiphon.gateway import clienttokens
from antiphon.gateway.clienttokens import (
    LEEWAY_S,
    MAX_CHARACTERS,
    MAX_MINUTES,
    PREFIX,
    Claims,
    ClientTokens,
    make_id,
)

NOW_S = 1_800_000_000
SECRET = bytes(range(32))
CLAIMS = Claims(
    key_id="key_0123456789abcdef",
    id="ct_0123456789abcdef",
    expires_at=NOW_S + 900,
    models=("scripted",),
    max_tokens=10_000,
    requests_per_minute=20,
    user="user-7",
)


class Wall:
    """The time of day, which a test moves in either direction."""

    def __init__(self) -> None:
        self.now_s = float(NOW_S)

    def __call__(self) -> float:
        return self.now_s


def _tokens(secret: bytes = SECRET) -> ClientTokens:
    return ClientTokens(secret, Wall())


counts = st.none() | st.integers(1, 2**53 - 1)
claims = st.builds(
    Claims,
    key_id=st.just(CLAIMS.key_id),
    id=st.builds(make_id),
    expires_at=st.integers(NOW_S + 1, NOW_S + 60 * MAX_MINUTES),
    models=st.none() | st.lists(st.text(min_size=1, max_size=10), max_size=4).map(tuple),
    max_tokens=counts,
    requests_per_minute=counts,
    user=st.none() | st.text(string.ascii_letters, min_size=1, max_size=64),
)


@given(claims)
def test_what_is_sealed_is_read(said: Claims) -> None:
    """Every claim comes back as it was, out of a short text of characters that URLs and headers take."""
    token = _tokens().seal(said)
    assert token.startswith(PREFIX)
    assert len(token) <= MAX_CHARACTERS
    assert set(token) <= set(string.ascii_letters + string.digits + "-_")
    assert _tokens().read(token) == said


def test_every_change_of_a_character_is_seen() -> None:
    """At each place each other character of the alphabet makes no token; nor does cutting it."""
    token = _tokens().seal(CLAIMS)
    for at in range(len(token)):
        for other in "AaQgZz09-_=.é":
            if other != token[at]:
                assert _tokens().read(token[:at] + other + token[at + 1 :]) is None, (at, other)
        assert _tokens().read(token[:at]) is None
    assert all(_tokens().read(token + more) is None for more in ("A", "=", "\n", " ", token))


@given(st.text(max_size=80) | st.binary(max_size=500).map(lambda b: base64.urlsafe_b64encode(b).decode()))
def test_nothing_else_is_read(text: str) -> None:
    """Whatever a client invents is no token, and never a fault."""
    assert _tokens().read(PREFIX + text) is None
    assert _tokens().read(PREFIX + text.rstrip("=")) is None


def test_secret_of_others() -> None:
    """A token of another fleet is none here; that of another gateway with our secret is."""
    token = _tokens(bytes(32)).seal(CLAIMS)
    assert _tokens().read(token) is None
    assert _tokens(bytes(32)).read(token) == CLAIMS


def test_version_is_under_the_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that is not ours is not read, sealed with our secret or relabelled."""
    monkeypatch.setattr(clienttokens, "_VERSION", b"\x02")
    later = _tokens().seal(CLAIMS)
    relabelled = base64.urlsafe_b64decode(later.removeprefix(PREFIX) + "==")[1:]
    monkeypatch.undo()
    assert _tokens().read(later) is None
    text = base64.urlsafe_b64encode(b"\x01" + relabelled).rstrip(b"=").decode()
    assert _tokens().read(PREFIX + text) is None


def test_end() -> None:
    """A token is good until `LEEWAY_S` after its time, and not at a clock so far off that nothing is sure."""
    wall = Wall()
    tokens = ClientTokens(SECRET, wall)
    assert tokens.end_after(15) == CLAIMS.expires_at
    token = tokens.seal(CLAIMS)
    for now_s, is_good in [
        (CLAIMS.expires_at, True),
        (CLAIMS.expires_at + LEEWAY_S - 0.001, True),
        (CLAIMS.expires_at + LEEWAY_S, False),
        (CLAIMS.expires_at + 10**9, False),
        (NOW_S, True),
        (NOW_S - LEEWAY_S, True),
        (CLAIMS.expires_at - 60 * MAX_MINUTES - 2 * LEEWAY_S, False),
        (0.0, False),
    ]:
        wall.now_s = now_s
        assert (tokens.read(token) == CLAIMS) is is_good, now_s


def test_longest_life_is_read_at_once_by_a_clock_that_is_behind() -> None:
    """Gateways whose clocks differ by less than the leeway agree on a fresh token."""
    maker, reader = Wall(), Wall()
    reader.now_s -= LEEWAY_S
    said = msgspec.structs.replace(CLAIMS, expires_at=ClientTokens(SECRET, maker).end_after(MAX_MINUTES))
    assert ClientTokens(SECRET, reader).read(ClientTokens(SECRET, maker).seal(said)) == said


def test_too_many_names() -> None:
    """A token that would be too long is refused, in words that name the field."""
    with pytest.raises(BadRequest) as caught:
        _tokens().seal(msgspec.structs.replace(CLAIMS, models=("m" * 400,)))
    assert caught.value.param == "models"


def test_grant_only_narrows() -> None:
    """Models are those that both allow, class and limits are the key's, and a token is never admin."""
    key = Grant(limits=Limits(tokens_per_day=5), models=("a", "b"), priority=Priority.BATCH, is_admin=True)
    for asked, left in [(None, ("a", "b")), (("b", "c"), ("b",)), (("c",), ())]:
        grant = msgspec.structs.replace(CLAIMS, models=asked).narrow(key)
        assert grant == Grant(limits=key.limits, models=left, priority=Priority.BATCH)
    assert msgspec.structs.replace(CLAIMS, models=None).narrow(FULL_GRANT) == FULL_GRANT
    assert CLAIMS.narrow(FULL_GRANT).models == ("scripted",)


def test_meter() -> None:
    """What a token used is counted by its own id, until it is good nowhere any more."""
    meter = CLAIMS.meter
    assert (meter.id, meter.max_tokens, meter.expires_at) == (CLAIMS.id, 10_000, NOW_S + 900 + LEEWAY_S)
    assert meter.limits == Limits(requests_per_minute=20)
