"""The chain of block hashes: equal exactly for equal input, border of public prefixes included."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.blockhash import (
    PUBLIC_SCOPE,
    BlockHash,
    Border,
    block_hash,
    chain_root,
    extend_chain,
    root_of,
)

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
NO_BORDER = Border()
ROOT = chain_root(b"namespace", b"scope")


def chain(ids: list[int], root: BlockHash = ROOT, border: Border = NO_BORDER) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_chain(hashes, root, ids, 4, border)
    return hashes


@given(one=IDS, two=IDS)
def test_two_prompts_share_exactly_their_common_blocks(one: list[int], two: list[int]) -> None:
    """A hash is equal if and only if every token up to the end of its block is."""
    for index, (left, right) in enumerate(zip(chain(one), chain(two), strict=False)):
        assert (left == right) == (one[: 4 * index + 4] == two[: 4 * index + 4])


@given(ids=IDS, cut=st.integers(0, 40))
def test_a_chain_can_be_extended_piece_by_piece(ids: list[int], cut: int) -> None:
    """Extending as tokens come gives the chain of the whole."""
    hashes = chain(ids[:cut])
    extend_chain(hashes, ROOT, ids, 4, Border())
    assert hashes == chain(ids)


@given(ids=IDS, num_public=st.integers(0, 40), steps=st.lists(st.integers(0, 4), max_size=12))
def test_a_chain_can_be_computed_as_far_as_it_is_needed(
    ids: list[int], num_public: int, steps: list[int]
) -> None:
    """In any steps, across the border of a public prefix: never past what was asked, in the end the whole."""
    border = Border(num_public, b"scope")
    hashes: list[BlockHash] = []
    for step in steps:
        most = len(hashes) + step
        extend_chain(hashes, ROOT, ids, 4, border, most)
        assert len(hashes) == min(most, len(ids) // 4)
    assert hashes == chain(ids, border=border)[: len(hashes)]
    extend_chain(hashes, ROOT, ids, 4, border)
    assert hashes == chain(ids, border=border)


def test_a_block_is_hashed_alone_as_in_a_chain() -> None:
    """What `block_hash` says of one block is what the chain says of it."""
    hashes = chain([5, 6, 7, 8, 9, 10, 11, 12])
    assert hashes == [block_hash(ROOT, [5, 6, 7, 8]), block_hash(hashes[0], [9, 10, 11, 12])]


def test_ids_are_fixed_width() -> None:
    """[1, 23] and [12, 3] must not collide, nor a token and its bytes."""
    assert block_hash(ROOT, [1, 23]) != block_hash(ROOT, [12, 3])
    assert block_hash(ROOT, [1]) != block_hash(ROOT, [0, 1])


def test_namespace_and_scope_cannot_be_confused() -> None:
    """Moving a byte from one to the other changes the root."""
    assert chain_root(b"ab", b"c") != chain_root(b"a", b"bc")
    assert chain_root(b"", b"x") != chain_root(b"x", b"")


def test_behind_a_public_prefix_each_scope_has_its_own_blocks() -> None:
    """Public blocks are shared; the first block after them and all later ones are not."""
    ids = list(range(16))
    one = chain(ids, border=Border(num_public_tokens=9, scope=b"one"))
    two = chain(ids, border=Border(num_public_tokens=9, scope=b"two"))
    assert one[:2] == two[:2] == chain(ids)[:2]
    assert all(left != right for left, right in zip(one[2:], two[2:], strict=True))


@given(num_public=st.integers(0, 16), ids=st.lists(st.integers(0, 9), min_size=16, max_size=16))
def test_tenants_share_whole_public_blocks_and_nothing_else(num_public: int, ids: list[int]) -> None:
    """Same tokens, two scopes: equal hashes exactly for the blocks that lie wholly in the public prefix."""
    chains = []
    for scope in (b"one", b"two"):
        root = root_of(b"namespace", scope, num_public, 4)
        chains.append(chain(ids, root, Border(num_public, scope)))
    shared = [left == right for left, right in zip(*chains, strict=True)]
    assert shared == [index < num_public // 4 for index in range(4)]


@given(num_public=st.integers(0, 16))
def test_a_block_belongs_to_the_scope_it_chains_under(num_public: int) -> None:
    """Public where it lies wholly in the public prefix, the tenant's from there on."""
    border = Border(num_public, b"tenant")
    scopes = [border.scope_of(index, 4) for index in range(4)]
    assert scopes == [PUBLIC_SCOPE if 4 * index + 4 <= num_public else b"tenant" for index in range(4)]


def test_a_public_chain_is_that_of_no_tenant() -> None:
    """Nor of another namespace."""
    public = root_of(b"n", b"tenant", 4, 4)
    assert public == chain_root(b"n", PUBLIC_SCOPE) == root_of(b"n", b"other", 7, 4)
    assert public not in (root_of(b"n", b"tenant", 3, 4), root_of(b"m", b"tenant", 4, 4))
