"""The blocks of a prompt as gateway and worker derive them, and where each of them lies. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from antiphon.core.blockhash import BlockHash, Border, extend_chain, root_of
from antiphon.kv.keys import block_key, scope_tag
from antiphon.worker.kvinfo import KvHeld, KvInfo

STORE = "redis"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and what decides who shares its KV."""

    token_ids: list[int]
    num_public_tokens: int = 0
    cache_salt: str | None = None
    prompt_cache_key: str | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """The hashes of a prompt's full blocks in a namespace, and their keys in the store."""

    hashes: list[str]
    keys: list[str]

    @classmethod
    def of(cls, info: KvInfo, prompt: Prompt, scope: bytes) -> Self:
        """As a worker with this `info` derives them."""
        namespace, size = bytes.fromhex(info.namespace), info.block_tokens
        border = Border(prompt.num_public_tokens, scope)
        root = root_of(namespace, scope, prompt.num_public_tokens, size)
        hashes: list[BlockHash] = []
        extend_chain(hashes, root, prompt.token_ids, size, border)
        keys = [
            block_key(namespace, scope_tag(border.scope_of(index, size)), block_hash)
            for index, block_hash in enumerate(hashes)
        ]
        return cls([block_hash.hex() for block_hash in hashes], keys)


@dataclass(frozen=True, slots=True)
class Found:
    """A block of the prompt. `places`: `engine@WORKER`, `host@WORKER`, `redis`."""

    index: int
    hash: str
    places: list[str]


def located(hashes: Sequence[str], held: Mapping[str, KvHeld], in_store: Sequence[bool]) -> Iterator[Found]:
    """Each block with all of its places, nearest first. `held`: by worker."""
    tiers = [(f"engine@{worker}", frozenset(page.engine)) for worker, page in held.items()]
    tiers += [(f"host@{worker}", frozenset(page.host)) for worker, page in held.items()]
    for index, (block_hash, is_stored) in enumerate(zip(hashes, in_store, strict=True)):
        places = [name for name, members in tiers if block_hash in members]
        yield Found(index, block_hash, [*places, STORE] if is_stored else places)
