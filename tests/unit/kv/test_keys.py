"""Keys in Redis: their spelling is fixed, they can be read back, and SCAN patterns find just them."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.lease import new_worker_id
from antiphon.core.scope import ScopeMaker
from antiphon.kv.keys import (
    ACL,
    PATTERNS,
    WORKERS_KEY,
    BlockKey,
    KeyPattern,
    Role,
    block_key,
    control_probe_key,
    lease_key,
    match_blocks,
    parse_block_key,
    probe_key,
    scope_tag,
)

HASH = bytes(range(32))
NAMESPACES = st.binary(min_size=8, max_size=8)
TAGS = st.binary(min_size=4, max_size=4)
HASHES = st.binary(min_size=32, max_size=32)
RANKS = st.none() | st.integers(0, 999_999_999)


def test_a_key_stays_what_it_is() -> None:
    """Another spelling would orphan what is stored."""
    key = block_key(b"namespc1", scope_tag(b"tenant"), HASH)
    assert key == f"antiphon:kv:6e616d6573706331:c0bff42a:{HASH.hex()}"
    assert block_key(b"namespc1", scope_tag(b"tenant"), HASH, 7) == key + ":7"


@given(namespace=NAMESPACES, tag=TAGS, block_hash=HASHES, rank=RANKS)
def test_a_key_can_be_read_back(namespace: bytes, tag: bytes, block_hash: bytes, rank: int | None) -> None:
    """Every part comes back, so two different blocks or ranks never share a key."""
    key = block_key(namespace, tag, block_hash, rank)
    assert parse_block_key(key) == BlockKey(namespace, tag, block_hash, rank)
    assert re.fullmatch("[a-z0-9:]+", key), "nothing a cluster, a glob or a shell would read"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "antiphon:kv",
        "antiphon:kv:*",
        block_key(b"namespc1", b"tag1", HASH)[:-1],
        block_key(b"namespc1", b"tag1", HASH) + "0",
        block_key(b"namespc1", b"tag1", HASH) + ":",
        block_key(b"namespc1", b"tag1", HASH) + ":01",
        block_key(b"namespc1", b"tag1", HASH) + ":-1",
        block_key(b"namespc1", b"tag1", HASH) + "\n",
        block_key(b"namespc1", b"tag1", HASH).upper(),
        "x" + block_key(b"namespc1", b"tag1", HASH),
    ],
)
def test_other_keys_are_not_blocks(key: str) -> None:
    """What `block_key` does not write is not read: commands that delete must not guess."""
    assert parse_block_key(key) is None


@pytest.mark.parametrize(
    ("namespace", "tag", "block_hash"),
    [(b"short", b"tag1", HASH), (b"namespc1", b"tag", HASH), (b"namespc1", b"tag1", HASH[:31])],
)
def test_a_part_of_the_wrong_length_is_refused(namespace: bytes, tag: bytes, block_hash: bytes) -> None:
    """Such a key would be missed for ever, or be another block's."""
    with pytest.raises(ValueError, match="bytes, not"):
        block_key(namespace, tag, block_hash)


@given(namespace=NAMESPACES, tag=TAGS, block_hash=HASHES, rank=RANKS, other=st.tuples(NAMESPACES, TAGS))
def test_patterns_find_their_blocks_and_no_others(
    namespace: bytes, tag: bytes, block_hash: bytes, rank: int | None, other: tuple[bytes, bytes]
) -> None:
    """Clearing a namespace or a tenant takes all of its keys and nobody else's."""
    key = block_key(namespace, tag, block_hash, rank)
    assert all(
        fnmatch.fnmatchcase(key, match_blocks(*args))
        for args in [(), (namespace,), (None, tag), (namespace, tag)]
    )
    assert fnmatch.fnmatchcase(key, match_blocks(other[0])) == (other[0] == namespace)
    assert fnmatch.fnmatchcase(key, match_blocks(None, other[1])) == (other[1] == tag)


def test_patterns_take_whole_parts_only() -> None:
    """A tag that is too short must not become a pattern that clears strangers' blocks."""
    with pytest.raises(ValueError, match="scope tag"):
        match_blocks(scope_tag=b"")
    with pytest.raises(ValueError, match="namespace"):
        match_blocks(namespace=b"12345678:")


def test_a_tenant_is_found_whatever_its_clients_narrow_by() -> None:
    """One tag for all scopes of a tenant; another for another tenant and for public blocks."""
    maker = ScopeMaker(bytes(32))
    plain = maker.scope("a", cache_salt=None, prompt_cache_key=None)
    narrowed = maker.scope("a", cache_salt="s", prompt_cache_key="k")
    other = maker.scope("b", cache_salt=None, prompt_cache_key=None)
    assert scope_tag(plain) == scope_tag(narrowed) == scope_tag(maker.tenant_part("a"))
    assert len({scope_tag(plain), scope_tag(other), scope_tag(PUBLIC_SCOPE)}) == 3


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_pattern_is_told_in_full(pattern: KeyPattern) -> None:
    """The page made from it has no empty cell, and every key begins with our prefix."""
    texts = (pattern.name, pattern.type, pattern.ttl, pattern.writer, pattern.readers, pattern.about)
    assert all(texts)
    assert pattern.pattern.startswith(f"antiphon:{pattern.role.value}:")


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("block", block_key(b"namespc1", b"tag1", HASH)),
        ("block", block_key(b"namespc1", b"tag1", HASH, 12)),
        ("probe", probe_key(b"nonce-01")),
        ("lease", lease_key(new_worker_id())),
        ("workers", WORKERS_KEY),
        ("control probe", control_probe_key(b"nonce-01", "value")),
    ],
)
def test_the_declared_pattern_is_the_one_in_use(name: str, made: str) -> None:
    """What the page says of a key fits the keys that are made."""
    (declared,) = (pattern.pattern for pattern in PATTERNS if pattern.name == name)
    shape = re.sub(r"<[^<>]*, (\d+) hex>", r"[0-9a-f]{\1}", declared)
    shape = shape.replace("[:<rank>]", r"(:\d+)?").replace("<kind>", "[a-z]+")
    assert "<" not in shape
    assert re.fullmatch(shape, made)


def test_a_probe_is_no_block() -> None:
    """Neither counted nor cleared as one."""
    probe = probe_key(b"nonce-01")
    assert parse_block_key(probe) is None
    assert not fnmatch.fnmatchcase(probe, match_blocks())
    with pytest.raises(ValueError, match="nonce"):
        probe_key(b"short")


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "*" * 32, "A" * 32])
def test_only_ids_become_keys_of_leases(text: str) -> None:
    """What comes out of a set in Redis is checked before it is a part of a key."""
    with pytest.raises(ValueError, match="no worker's id"):
        lease_key(text)


@pytest.mark.parametrize("role", Role)
def test_rights_that_are_advised_reach_the_keys_of_the_role_alone(role: Role) -> None:
    """One pattern, the prefix that all its keys have."""
    assert re.findall(r"~(\S+)", ACL[role]) == [f"antiphon:{role}:*"]
