"""Who may call: the whole table of gateway/callers.py, line by line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Scope

from antiphon.core.errors import AntiphonError, BadRequest, Forbidden, StoreUnavailable, Unauthorized
from antiphon.gateway.callers import LOCAL, Caller, Callers, is_loopback, require_guard
from antiphon.gateway.clienttokens import LEEWAY_S, Claims, ClientTokens
from antiphon.gateway.cors import Origins
from antiphon.store.keys import KeyOwner

GOOD, REVOKED, OTHER = b"Bearer good", b"Bearer revoked", b"Bearer other"
ACME = Caller("tenant_1", "acme", "key_1")
OWNERS = {
    "good": KeyOwner("key_1", "tenant_1", "acme", False),
    "revoked": KeyOwner("key_2", "tenant_1", "acme", True),
}
NOW_S = 1_800_000_000.0
TOKENS = ClientTokens(bytes(32), lambda: NOW_S)


class Ring:
    """What is known of keys; `has_keys` None: the database does not answer."""

    def __init__(self, has_keys: bool | None) -> None:
        self._has_keys = has_keys

    @property
    def has_keys(self) -> bool:
        if self._has_keys is None:
            raise StoreUnavailable("words", detail="d")
        return self._has_keys

    async def owner(self, key: str) -> KeyOwner | None:
        if self._has_keys is None:
            raise StoreUnavailable("words", detail="d")
        return OWNERS.get(key)

    async def owner_by_id(self, key_id: str) -> KeyOwner | None:
        if self._has_keys is None:
            raise StoreUnavailable("words", detail="d")
        return next((owner for owner in OWNERS.values() if owner.key_id == key_id), None)


def _scope(*authorizations: bytes) -> Scope:
    headers = [(b"host", b"127.0.0.1:8000"), *((b"authorization", value) for value in authorizations)]
    return {"type": "http", "headers": headers}


async def _identify(ring: Ring, loopback: bool, *authorizations: bytes) -> Caller:
    callers = Callers(ring, TOKENS, Origins(["https://app.example"]), is_loopback=loopback)  # type: ignore[arg-type]  # a ring by its shape
    return await callers.identify(_scope(*authorizations))


async def _identified(loopback: bool, has_keys: bool | None, *authorizations: bytes) -> object:
    try:
        return await _identify(Ring(has_keys), loopback, *authorizations)
    except AntiphonError as error:
        return type(error)


TABLE = [
    # loopback, keys exist, header, who it is
    (True, False, None, LOCAL),
    (True, False, OTHER, LOCAL),
    (True, False, GOOD, ACME),  # it came into being since keys were last looked for
    (True, False, REVOKED, Unauthorized),  # and was revoked already
    (True, True, None, LOCAL),
    (True, True, GOOD, ACME),
    (True, True, OTHER, Unauthorized),
    (True, True, REVOKED, Unauthorized),
    (True, None, None, LOCAL),
    (True, None, GOOD, StoreUnavailable),
    (True, None, OTHER, StoreUnavailable),
    (False, True, None, Unauthorized),
    (False, True, GOOD, ACME),
    (False, True, OTHER, Unauthorized),
    (False, True, REVOKED, Unauthorized),
    (False, False, None, LOCAL),  # behind a proxy: else the gateway does not start
    (False, False, OTHER, LOCAL),
    (False, None, None, StoreUnavailable),
    (False, None, GOOD, StoreUnavailable),
]


@pytest.mark.parametrize(("loopback", "has_keys", "header", "expected"), TABLE)
async def test_table(loopback: bool, has_keys: bool | None, header: bytes | None, expected: object) -> None:
    """Each combination of address, keys and header has its one answer."""
    assert await _identified(loopback, has_keys, *([] if header is None else [header])) == expected


@pytest.mark.parametrize("header", [b"bearer good", b"BEARER good", b"Bearer   good", b" Bearer good "])
async def test_spellings_of_bearer(header: bytes) -> None:
    """The scheme's case and spaces around do not matter."""
    assert await _identified(False, True, header) == ACME


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"bearer   "])
async def test_empty_is_none(header: bytes) -> None:
    """SDKs with an empty key send the scheme alone: no key is no key."""
    assert (await _identified(True, True, header), await _identified(False, True, header)) == (
        LOCAL,
        Unauthorized,
    )


@pytest.mark.parametrize(
    "header", [b"good", b"Basic good", b"Bearer good, good", b"Bearer go\xffd", b"Token good"]
)
async def test_other_schemes_are_wrong_keys(header: bytes) -> None:
    """What is presented and is no good key is refused, on loopback too once there are keys."""
    assert await _identified(True, True, header) == Unauthorized


async def test_two_headers_are_a_wrong_key() -> None:
    """Who reads which of two would be chance."""
    assert await _identified(True, True, GOOD, GOOD) == Unauthorized
    assert await _identified(True, True, OTHER, GOOD) == Unauthorized


@given(st.binary(max_size=60))
async def test_nothing_but_a_good_key_is_a_tenant(header: bytes) -> None:
    """Whatever a header holds, it is no tenant's unless it is its key, and never a fault."""
    assert await _identified(False, True, header) in (
        Unauthorized,
        ACME if b"good" in header else Unauthorized,
    )


async def test_wrong_keys_hear_the_same() -> None:
    """A revoked and an unknown key cannot be told apart, and no answer repeats a key."""
    messages = set()
    for header in (OTHER, REVOKED, b"Basic abc"):
        with pytest.raises(Unauthorized) as caught:
            await _identify(Ring(True), True, header)
        messages.add(caught.value.message)
    (message,) = messages
    assert not any(word in message for word in ("other", "revoked", "abc"))


LOOPBACK = ["127.0.0.1", "127.0.0.2", "::1", "localhost"]
REACHED = [
    "0.0.0.0",
    "::",
    "",
    "192.168.1.4",
    "example.org",
    "127.0.0.1.example.org",
    "localhost.example.org",
]


def test_what_is_loopback() -> None:
    """Addresses that only this machine reaches, and names only where they can mean nothing else."""
    assert [host for host in LOOPBACK + REACHED if is_loopback(host)] == LOOPBACK


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_no_guard(host: str) -> None:
    """Addresses that only this machine reaches are free to use."""
    require_guard(host, has_keys=False, behind_proxy=False)


@pytest.mark.parametrize("host", REACHED)
def test_other_hosts_need_a_guard(host: str) -> None:
    """Keys, or the operator's word that somebody else checks; the refusal names both ways."""
    with pytest.raises(BadRequest, match=r"antiphon keys create.*--behind-proxy"):
        require_guard(host, has_keys=False, behind_proxy=False)
    require_guard(host, has_keys=True, behind_proxy=False)
    require_guard(host, has_keys=False, behind_proxy=True)


def _token(key_id: str = "key_1", expires_at: float = NOW_S + 60) -> bytes:
    claims = Claims(key_id=key_id, id="ct_1", expires_at=int(expires_at), max_tokens=9, user="u")
    return b"Bearer " + TOKENS.seal(claims).encode()


async def test_token_is_its_keys_tenant() -> None:
    """Its requests are the key's, counted against both."""
    caller = await _identify(Ring(True), False, _token())
    assert (caller.tenant_id, caller.tenant, caller.key_id, caller.end_user) == (
        "tenant_1",
        "acme",
        "key_1",
        "u",
    )
    assert [meter.id for meter in caller.meters] == ["key_1", "ct_1"]
    assert [meter.max_tokens for meter in caller.meters] == [None, 9]
    assert [meter.id for meter in ACME.meters] == ["key_1"]
    assert LOCAL.meters == ()


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize(
    "header",
    [
        _token("key_2"),  # revoked
        _token("key_3"),  # no key's
        _token(expires_at=NOW_S - LEEWAY_S),
        _token()[:-1],
        b"Bearer ant-ct-",
        b"Bearer ant-ct-x",
    ],
)
async def test_bad_tokens_are_wrong_keys(header: bytes, has_keys: bool) -> None:
    """They hear what wrong keys hear, also where any key is taken because there are none."""
    with pytest.raises(Unauthorized) as caught:
        await _identify(Ring(has_keys), True, header)
    with pytest.raises(Unauthorized) as other:
        await _identify(Ring(True), True, OTHER)
    assert caught.value.message == other.value.message


async def test_token_waits_for_the_database_too() -> None:
    """Where nobody knows whether its key stands, a token is not taken."""
    assert await _identified(True, None, _token()) == StoreUnavailable


async def _page(
    host: bytes, origin: bytes | None = None, *, behind_proxy: bool = False, loopback: bool = True
) -> object:
    """Who a request with this Host and Origin is, without a key, where there are none."""
    headers = [(b"host", host), *([] if origin is None else [(b"origin", origin)])]
    callers = Callers(
        Ring(False),  # type: ignore[arg-type]  # a ring by its shape
        TOKENS,
        Origins(["https://app.example"]),
        is_loopback=loopback,
        behind_proxy=behind_proxy,
    )
    try:
        return await callers.identify({"type": "http", "headers": headers})
    except AntiphonError as error:
        return type(error)


OWN = [
    (b"127.0.0.1:8000", None),
    (b"localhost", None),
    (b"LOCALHOST:8000", b"http://localhost:8000"),
    (b"[::1]:8000", b"http://[::1]:8000"),
    (b"127.0.0.1:8443", b"https://127.0.0.1:8443"),
    (b"127.0.0.1:8000", b"https://app.example"),
]
FOREIGN = [
    (b"127.0.0.1:8000", b"https://evil.example"),
    (b"127.0.0.1:8000", b"http://127.0.0.1:3000"),  # another server of this machine
    (b"127.0.0.1:8000", b"null"),
    (b"127.0.0.1:8000", b""),
    (b"evil.example:8000", b"http://evil.example:8000"),  # a name that was pointed here
    (b"evil.example", None),
    (b"127.0.0.1.evil.example", None),
    (b"localhost.evil.example:8000", b"http://localhost.evil.example:8000"),
    (b"10.0.0.7:8000", b"http://10.0.0.7:8000"),
]


@pytest.mark.parametrize(("host", "origin"), OWN)
async def test_programs_and_pages_of_this_machine(host: bytes, origin: bytes | None) -> None:
    """They need no key, under any name that can mean this machine alone; nor do pages that were allowed."""
    assert await _page(host, origin) == LOCAL


@pytest.mark.parametrize(("host", "origin"), FOREIGN)
async def test_pages_of_others(host: bytes, origin: bytes | None) -> None:
    """They are refused, however the browser was led here; where a proxy checks callers, that is its part."""
    assert await _page(host, origin) == Forbidden
    assert await _page(host, origin, behind_proxy=True) == LOCAL
    assert await _page(host, origin, behind_proxy=True, loopback=False) == LOCAL


@pytest.mark.parametrize(("host", "origin"), FOREIGN)
async def test_a_key_comes_from_anywhere(host: bytes, origin: bytes | None) -> None:
    """Who shows a key is no browser that was tricked: no page has one that was not given it."""
    headers = [(b"host", host), (b"authorization", GOOD), *([] if origin is None else [(b"origin", origin)])]
    callers = Callers(Ring(True), TOKENS, Origins(), is_loopback=True)  # type: ignore[arg-type]  # as above
    assert await callers.identify({"type": "http", "headers": headers}) == ACME


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize("header", [None, b"Bearer any"])
async def test_where_a_key_is_required_nobody_comes_without(
    has_keys: bool, loopback: bool, header: bytes | None
) -> None:
    """Also on loopback, and before there is one."""
    callers = Callers(
        Ring(has_keys),  # type: ignore[arg-type]  # as above
        TOKENS,
        Origins(),
        is_loopback=loopback,
        require_key=True,
    )
    with pytest.raises(Unauthorized):
        await callers.identify(_scope(*([] if header is None else [header])))
