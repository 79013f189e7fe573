"""Which KV stream holds what: the bookkeeping under `LlamaRunner`.

llama.cpp steps fastest when every sequence has a KV stream of its own (docs/adr/0001), so a block
is shared by copying it. A stream keeps what its last sequence left, until another sequence is put
there: a conversation that comes back continues in place, others copy from it.

Invariants: a sequence is in one stream; a kept block is in at least one stream or in `saved`; the
caller saves a stream's blocks (`unsaved`) before it overwrites them. Knows no llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NOTHING = -1  # in `blocks`: this index holds no block that may be asked for

# A free stream that holds this many more of the wanted blocks is taken although a lower one is free:
# low streams keep steps in one piece, but so many blocks cost more to copy.
_WORTH_A_GAP_BLOCKS = 8


@dataclass(slots=True, eq=False)
class Stream:
    """One KV stream: `num_cells` positions filled, `blocks[i]` the kept block at index i."""

    index: int
    sequence: int | None = None
    num_cells: int = 0
    blocks: list[int] = field(default_factory=list)

    def num_matching(self, blocks: list[int]) -> int:
        """How many leading blocks of `blocks` it holds in place."""
        count = 0
        for mine, wanted in zip(self.blocks, blocks, strict=False):
            if mine != wanted:
                break
            count += 1
        return count


class Streams:
    """All streams of a context."""

    def __init__(self, num_streams: int) -> None:
        self.all = [Stream(i) for i in range(num_streams)]
        self._by_sequence: dict[int, Stream] = {}
        self._holders: dict[int, list[Stream]] = {}  # kept block -> streams that hold it
        self.saved: dict[int, bytes] = {}  # kept block -> payload

    def of(self, sequence: int) -> Stream:
        return self._by_sequence[sequence]

    def holder(self, block: int) -> Stream | None:
        """A stream that holds the block, if any."""
        holders = self._holders.get(block)
        return holders[0] if holders else None

    def choose(self, blocks: list[int]) -> Stream:
        """The free stream to put a sequence with these leading blocks in. Does not modify."""
        free = [s for s in self.all if s.sequence is None]
        best = max(free, key=lambda s: s.num_matching(blocks))
        lowest = free[0]
        gain = best.num_matching(blocks) - lowest.num_matching(blocks)
        return best if gain >= _WORTH_A_GAP_BLOCKS else lowest

    def unsaved(self, stream: Stream, keep: int) -> list[int]:
        """Kept blocks beyond the first `keep` whose only copy is in this stream."""
        return [
            b
            for b in stream.blocks[keep:]
            if b != NOTHING and b not in self.saved and self._holders[b] == [stream]
        ]

    def occupy(self, stream: Stream, sequence: int, blocks: list[int], block_tokens: int) -> None:
        """The stream now holds exactly these blocks and belongs to the sequence."""
        for index in range(len(stream.blocks)):
            self._unset(stream, index)
        stream.blocks = []
        stream.sequence = sequence
        stream.num_cells = len(blocks) * block_tokens
        self._by_sequence[sequence] = stream
        for index, block in enumerate(blocks):
            self.set(stream, index, block)

    def set(self, stream: Stream, index: int, block: int) -> None:
        """The stream holds `block` at `index`."""
        while len(stream.blocks) <= index:
            stream.blocks.append(NOTHING)
        self._unset(stream, index)
        stream.blocks[index] = block
        self._holders.setdefault(block, []).append(stream)

    def vacate(self, sequence: int) -> Stream | None:
        """The sequence has ended. Returns its stream, which keeps its blocks; None if it had none."""
        stream = self._by_sequence.pop(sequence, None)
        if stream is not None:
            stream.sequence = None
        return stream

    def drop(self, block: int) -> None:
        """Nobody will ask for this block again."""
        self.saved.pop(block, None)
        for stream in self._holders.pop(block, []):
            stream.blocks[stream.blocks.index(block)] = NOTHING

    def _unset(self, stream: Stream, index: int) -> None:
        block = stream.blocks[index]
        if block == NOTHING:
            return
        stream.blocks[index] = NOTHING
        holders = self._holders[block]
        holders.remove(stream)
        if not holders:
            del self._holders[block]
