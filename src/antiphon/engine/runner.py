"""The `ModelRunner` seam: what runs the model and holds the KV bytes.

Implementations: `llama.LlamaRunner` (llama.cpp) and `scripted.ScriptedRunner`. One contract suite
runs over both.

The scheduler thinks in logical blocks: fixed runs of `block_tokens` positions, counted, shared and
evicted by `BlockManager`. Where a block's bytes lie is the runner's business; it must be able to
start a sequence from any blocks it was not told to drop.
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

    ::

        block_table  [ b0 | b1 | b2 | b3 ]
        tokens             ^start … start + len(tokens)

    KV of positions below `start` is there already; KV of these is written by the step.
    """

    sequence: int
    start: int
    tokens: list[int]
    block_table: list[int]
    wants_logits: bool  # of the last token only


class RunnerFault(Exception):
    """The step failed; the sequences in it are lost, the runner can go on."""


class ModelRunner(Protocol):
    """Runs the model. Single-threaded; every call returns when it is done."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Most tokens (prompt and answer) a sequence may have."""
        ...

    @property
    def max_sequences(self) -> int:
        """Most sequences open at once."""
        ...

    def open(self, sequence: int, blocks: list[int]) -> None:
        """Begin a sequence whose first positions are these full blocks, in order."""
        ...

    def run(self, chunks: list[Chunk]) -> Logits:
        """Compute the chunks in one step. At most one chunk a sequence.

        Returns one row of `vocab_size` float32 logits per chunk that wants them, in chunk order;
        valid until the next `run`. Raises RunnerFault.
        """
        ...

    def close(self, sequence: int, keep: list[int]) -> None:
        """End a sequence. Its leading full blocks `keep` may be asked for again until dropped."""
        ...

    def drop(self, blocks: list[int]) -> None:
        """These blocks will never be asked for again."""
        ...

    def export_block(self, block: int) -> bytes:
        """The KV bytes of a full block, in the runner's own format."""
        ...

    def import_block(self, block: int, index: int, payload: bytes) -> None:
        """Take over the KV bytes of the `index`-th block of a chain. The caller has verified them."""
        ...
