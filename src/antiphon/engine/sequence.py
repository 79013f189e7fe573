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

from antiphon.core.blockhash import BlockHash, Border, chain_root, extend_chain
from antiphon.core.generation import CachedTokens, Generation
from antiphon.engine.sampling import Sampler


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice's tokens and how far they are computed."""

    key: int  # what the runner knows it by
    generation: Generation
    choice: int
    tokens: list[int]
    sampler: Sampler
    arrived_s: float
    deadline_s: float | None
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_kept: int = 0  # leading blocks that carry their hash
    cached: CachedTokens | None = None  # found at the first admission
    queued_s: float | None = None  # arrival to first admission
    has_spoken: bool = False  # its first output is out

    @property
    def num_prompt_tokens(self) -> int:
        return self.generation.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def position(self) -> int:
        """Answer position of the next token."""
        return len(self.tokens) - self.num_prompt_tokens

    def extend_hashes(self, block_tokens: int) -> list[BlockHash]:
        """Hashes of all blocks that the tokens fill now."""
        generation = self.generation
        root = generation.chain_root or chain_root(b"", generation.tenant.encode())
        border = Border(generation.num_public_tokens, generation.scope)
        extend_chain(self.hashes, root, self.tokens, block_tokens, border)
        return self.hashes
