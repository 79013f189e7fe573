"""The `ModelRunner` seam: what runs the model and holds the KV bytes.

Implementations: `llama.LlamaRunner` (llama.cpp) and `scripted.ScriptedRunner`. One contract suite
runs over both.

The scheduler thinks in logical blocks: fixed runs of `block_tokens` positions, counted, shared and
evicted by `BlockManager`. Where a block's bytes lie is the runner's business: between `keep` (or
`import_block`) and `drop` it must be able to begin a sequence with that block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that this step computes.

    KV of positions below `start` is there already; KV of `start` … `start + len(tokens) - 1` is
    written by the step. Logits are of the last token only, and only where they are sampled.
    """

    sequence: int
    start: int
    tokens: list[int]
    wants_logits: bool


class RunnerFault(Exception):
    """The step failed: the sequences in it are lost, the runner can go on with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDescription:
    """What the bytes of a runner's blocks depend on beside the weights: what a KV namespace is made of."""

    architecture: str  # as the model file names it
    rope_dimensions: int
    rope_base: float
    rope_scaling: str  # none, linear, yarn …
    rope_factor: float
    rope_original_tokens: int  # context before scaling; 0: none
    k_type: str
    v_type: str
    kv_rotated: bool  # quantised KV is kept rotated
    engine: str
    engine_version: str
    layout: str  # of a payload


class ModelRunner(Protocol):
    """Runs the model. Single-threaded; every call returns when it is done."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Most tokens (prompt and answer) a sequence may have."""
        ...

    @property
    def block_tokens(self) -> int:
        """Token positions a block holds."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of an exported block; 0 where blocks are not shared."""
        ...

    @property
    def max_sequences(self) -> int:
        """Most sequences open at once."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether `keep` and `open` with blocks work for this model. If not, they are not called."""
        ...

    @property
    def start_prefill_tokens_per_s(self) -> float:
        """How fast a short prompt was computed when the runner was made; 0: not measured."""
        ...

    @property
    def kv_description(self) -> KvDescription:
        """What other runners must have in common to take over this one's blocks."""
        ...

    def open(self, sequence: int, blocks: list[int]) -> float:
        """Begin a sequence whose first positions are these blocks, in order.

        Returns the seconds it took to copy them in: 0 where they lie in place.
        """
        ...

    def run(self, chunks: list[Chunk]) -> Logits:
        """Compute the chunks in one step. At most one chunk a sequence.

        Returns one row of `vocab_size` float32 logits per chunk that wants them, in chunk order;
        valid until the next `run`. Raises RunnerFault.
        """
        ...

    def keep(self, sequence: int, index: int, block: int) -> None:
        """The `index`-th block of an open sequence is computed: it may be asked for as `block` now."""
        ...

    def close(self, sequence: int) -> None:
        """End a sequence; the blocks kept of it stay. Safe for one that is not open."""
        ...

    def drop(self, block: int) -> None:
        """This block will not be asked for again; its number may come back with other content."""
        ...

    def export_blocks(self, blocks: list[int]) -> list[bytes]:
        """The KV bytes of kept blocks, in the runner's own format. Ask for many at once.

        Raises RunnerFault; then none is exported.
        """
        ...

    def import_block(self, block: int, payload: bytes | memoryview) -> None:
        """Take over the bytes of a block under this number. The caller has verified their origin.

        Raises ValueError where the length is not that of a block; then nothing is taken.
        """
        ...
