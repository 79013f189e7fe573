"""A full block of tokens as the KV tiers know it: named by its input, owned by a scope.

Shared by the engine, which fills blocks, and the kv package, which keeps them. Holds no KV bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from antiphon.core.blockhash import BlockHash


class Tier(enum.IntEnum):
    """Where KV lay before a sequence used it, nearest first."""

    ENGINE = 0
    HOST = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class KvBlock:
    """`block_tokens` token ids at block `index` of a chain. `scope`: whose bytes they are."""

    hash: BlockHash
    index: int
    token_ids: tuple[int, ...]
    scope: bytes


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a waiting generation could take over: its full blocks, never all of its tokens.

    The first `num_local` of `blocks` are in the engine already.
    """

    generation: str
    blocks: tuple[KvBlock, ...]
    num_local: int
    num_prompt_tokens: int
