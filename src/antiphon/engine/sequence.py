"""One choice of one generation inside the engine.

::

    tokens       [ prompt … | answer … ]
                            ^num_prompt_tokens
    computed     [ ======== ]                 KV exists for tokens[:num_computed]
    block_table  [ b0 | b1 | b2 | b3 ]        covers at least num_computed tokens
    hashes       [ h0 | h1 | h2 ]             one per full block of tokens

A sequence has no prefill phase and no decode phase: its computed tokens catch up with its tokens,
and each time they have, the logits of the last one give the next (the rule is vLLM's). Holds state
only; `Scheduler` and `Engine` change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from antiphon.core.blockhash import PUBLIC_SCOPE, BlockHash, Border, extend_chain, root_of
from antiphon.core.errors import BadRequest
from antiphon.core.generation import CachedTokens, Generation, KvReport
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.core.scope import tenant_part_of
from antiphon.engine.sampling import Sampler


@dataclass(slots=True, eq=False)
class Supply:
    """What a generation gets from tiers beyond the engine; its choices share one.

    `until_s`: until then its first sequence is held back. None: not, or no longer.
    """

    until_s: float | None = None
    tiers: dict[BlockHash, Tier] = field(default_factory=dict)  # of the blocks imported for it
    report: KvReport = field(default_factory=KvReport)
    import_s: float = 0.0  # spent on taking its blocks over, before its sequence began
    is_counted: bool = False  # by the choice that was admitted first


@dataclass(frozen=True, slots=True)
class Chain:
    """What block hashes of a generation depend on beside its tokens."""

    root: BlockHash
    border: Border
    block_tokens: int

    @classmethod
    def of(cls, generation: Generation, namespace: bytes, block_tokens: int) -> Chain:
        """The chain of a generation's blocks in a namespace."""
        border = Border(generation.num_public_tokens, generation.kv_scope)
        return cls(
            root_of(namespace, border.scope, border.num_public_tokens, block_tokens), border, block_tokens
        )


def check_borders(generation: Generation) -> None:
    """Where prompt, answer and public prefix end must fit the tokens. Raises BadRequest."""
    num_tokens, num_prompt_tokens = len(generation.token_ids), generation.num_prompt_tokens
    if num_tokens == 0:
        raise BadRequest("The prompt has no tokens.", param="messages")
    if not 0 < num_prompt_tokens <= num_tokens:
        raise BadRequest("num_prompt_tokens is outside the token ids.")
    if not 0 <= generation.num_public_tokens <= num_prompt_tokens:
        raise BadRequest("num_public_tokens is outside the prompt.")
    if generation.is_prefill_only and len(generation.choices) != 1:
        raise BadRequest("A prompt's KV is computed once: n must be 1.")
    if generation.scope == PUBLIC_SCOPE:
        raise BadRequest("A generation's own scope cannot be the public one.")


def prompt_blocks(generation: Generation, block_tokens: int) -> Generation:
    """The generation, cut to those full blocks of its prompt that another engine could take over."""
    num_tokens = (generation.num_prompt_tokens - 1) // block_tokens * block_tokens
    return msgspec.structs.replace(
        generation,
        token_ids=generation.token_ids[:num_tokens],
        num_prompt_tokens=num_tokens,
        num_public_tokens=min(generation.num_public_tokens, num_tokens),
    )


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice's tokens and how far they are computed."""

    key: int  # what the runner knows it by
    generation: Generation
    choice: int
    tokens: list[int]
    sampler: Sampler
    chain: Chain
    arrived_s: float
    deadline_s: float | None
    supply: Supply | None = None  # None: the engine's own blocks are all there are
    is_held: bool = False  # waits for `supply`
    num_computed: int = 0
    num_found: int = 0  # tokens whose KV the engine held when it arrived
    block_table: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_kept: int = 0  # leading blocks that carry their hash
    num_offered: int = 0  # leading blocks when it was last offered for export
    is_prompt_offered: bool = False  # its whole prompt's were among them
    cached: CachedTokens | None = None  # found at the first admission
    num_brought: int = 0  # blocks among those that came for it, and were not copied into place yet
    report: KvReport | None = None  # likewise, on the choice of a supplied generation that was admitted first
    queued_s: float | None = None  # arrival to first admission
    has_spoken: bool = False  # its first output is out

    @property
    def num_prompt_tokens(self) -> int:
        return self.generation.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_prompt_left(self) -> int:
        """Tokens before its next answer token that are still to be computed, as far as was known at arrival.

        0 while it is answering.
        """
        return max(len(self.tokens) - max(self.num_computed, self.num_found) - 1, 0)

    @property
    def position(self) -> int:
        """Answer position of the next token."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_usable_blocks(self) -> int:
        """Full blocks it could take over: never all of its tokens, the last one must run to give logits."""
        return (len(self.tokens) - 1) // self.chain.block_tokens

    def extend_hashes(self) -> list[BlockHash]:
        """Hashes of all blocks that the tokens fill now."""
        chain = self.chain
        extend_chain(self.hashes, chain.root, self.tokens, chain.block_tokens, chain.border)
        return self.hashes

    def block_at(self, index: int) -> KvBlock:
        """The full block at `index`; its hash is there already."""
        size = self.chain.block_tokens
        ids = tuple(self.tokens[index * size : (index + 1) * size])
        return KvBlock(self.hashes[index], index, ids, self.chain.border.scope_of(index, size))

    def owner_at(self, index: int) -> bytes:
        """What tells whose the full block at `index` is, in all its scopes."""
        return tenant_part_of(self.chain.border.scope_of(index, self.chain.block_tokens))

    def count_hits(self, num_hits: int) -> None:
        """Note by tier what the first admission found; later ones change nothing.

        What was brought for a generation counts for the choice that is admitted first; to the others it
        is in the engine, like all else.
        """
        if self.cached is not None:
            return
        size, prompt = self.chain.block_tokens, self.num_prompt_tokens
        supply = self.supply
        if supply is None or supply.is_counted:
            self.cached = CachedTokens(engine=min(num_hits * size, prompt))
            return
        supply.is_counted = True
        blocks, tokens = [0, 0, 0], [0, 0, 0]
        for index in range(num_hits):
            tier = supply.tiers.get(self.hashes[index], Tier.ENGINE)
            blocks[tier] += 1
            tokens[tier] += min(size, max(0, prompt - index * size))
        self.cached = CachedTokens(*tokens)
        self.num_brought = num_hits - blocks[Tier.ENGINE]
        self.report = msgspec.structs.replace(
            supply.report,
            num_local=blocks[Tier.ENGINE],
            num_host=blocks[Tier.HOST],
            num_store=blocks[Tier.STORE],
            num_computed=self.num_usable_blocks - num_hits,
        )
