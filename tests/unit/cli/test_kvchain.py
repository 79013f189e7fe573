"""The blocks of a prompt, as a worker derives them."""

from __future__ import annotations

import pytest

from antiphon.cli.kvchain import Chain, Found, Prompt, located
from antiphon.core.blockhash import PUBLIC_SCOPE, block_hash, chain_root
from antiphon.core.kvblock import KvBlock
from antiphon.kv.codec import BlockCodec
from antiphon.worker.kvinfo import KvHeld
from support.kvpages import make_info
from support.kvvalues import KEYS, NAMESPACE, SCOPE

INFO = make_info(namespace=NAMESPACE, block_tokens=4)
CODEC = BlockCodec(NAMESPACE, KEYS)


def test_chain_is_what_a_worker_derives() -> None:
    """Root, hashes and keys of full blocks; the rest of the prompt has none."""
    ids = list(range(11))
    chain = Chain.of(INFO, Prompt(ids), SCOPE)
    assert len(chain.hashes) == 2
    parent = chain_root(NAMESPACE, SCOPE)
    for index in range(2):
        part = tuple(ids[4 * index : 4 * index + 4])
        parent = block_hash(parent, part)
        assert chain.hashes[index] == parent.hex()
        assert chain.keys[index] == CODEC.key(KvBlock(parent, index, part, SCOPE))


@pytest.mark.parametrize("num_public_tokens", [4, 7])
def test_public_blocks_are_everybodys(num_public_tokens: int) -> None:
    """Whole public blocks chain under the public root and tag; what follows is the tenant's."""
    ids = list(range(12))
    chain = Chain.of(INFO, Prompt(ids, num_public_tokens), SCOPE)
    first = block_hash(chain_root(NAMESPACE, PUBLIC_SCOPE), ids[:4])
    second = block_hash(first, ids[4:8], SCOPE)
    assert chain.hashes[:2] == [first.hex(), second.hex()]
    assert chain.keys[0] == CODEC.key(KvBlock(first, 0, tuple(ids[:4]), PUBLIC_SCOPE))
    assert chain.keys[1] == CODEC.key(KvBlock(second, 1, tuple(ids[4:8]), SCOPE))


def test_chain_of_a_short_prompt_is_empty() -> None:
    """No full block, nothing to find."""
    assert Chain.of(INFO, Prompt([1, 2, 3]), SCOPE) == Chain([], [])


def test_block_has_all_of_its_places_nearest_first() -> None:
    """Engines, host tiers, the store; a block that is nowhere has none."""
    held = {"w1": KvHeld(engine=["a"], host=["a", "b"]), "w2": KvHeld(engine=["a"], host=[])}
    assert list(located(["a", "b", "c", "d"], held, [True, False, True, False])) == [
        Found(0, "a", ["engine@w1", "engine@w2", "host@w1", "redis"]),
        Found(1, "b", ["host@w1"]),
        Found(2, "c", ["redis"]),
        Found(3, "d", []),
    ]
