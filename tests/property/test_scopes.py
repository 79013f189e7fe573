"""Scopes under anything a client can send: they separate, and only the server's secret joins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.scope import ScopeMaker, tenant_part_of

# Few letters, so that joins like ("ab", "c") and ("a", "bc") are really tried; and anything at all.
TEXT = st.text("ab:\0", max_size=3) | st.text(max_size=40)
WORD = st.none() | TEXT
ASKED = st.tuples(TEXT, WORD, WORD)
SECRET = st.binary(min_size=32, max_size=32)
MAKER = ScopeMaker(bytes(32))


def _scope(asked: tuple[str, str | None, str | None], maker: ScopeMaker = MAKER) -> bytes:
    tenant, salt, key = asked
    return maker.scope(tenant, cache_salt=salt, prompt_cache_key=key)


@given(ASKED, ASKED)
def test_scopes_are_injective(one: tuple[str, str | None, str | None], other: tuple[str, str, str]) -> None:
    """Tenant and both words decide the scope, and nothing else gives the same one."""
    assert (_scope(one) == _scope(other)) == (one == other)


@given(ASKED, ASKED)
def test_no_word_leads_to_another_tenant(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """Whatever clients send, scopes of two tenants differ in the part that finds a tenant's blocks."""
    same_tenant = one[0] == other[0]
    assert (tenant_part_of(_scope(one)) == tenant_part_of(_scope(other))) == same_tenant


@given(ASKED, SECRET)
def test_secret_decides(asked: tuple[str, str, str], secret: bytes) -> None:
    """Without the server's secret nobody computes a scope."""
    assert (_scope(asked, ScopeMaker(secret)) == _scope(asked)) == (secret == bytes(32))
