"""Which KV stream holds what: the bookkeeping under `LlamaRunner`.

llama.cpp steps fastest when every sequence has a KV stream of its own (docs/adr/0001), so a block
is shared by copying it. A stream keeps what its last sequence left, until another sequence is put
there: a conversation that comes back continues in place, others copy from it.

A payload is needed as long as no stream holds its block. Beyond that it is spare: good for the next
copy, and bounded, because the same KV lies in a stream already.

Invariants: a sequence is in one stream; a kept block is in at least one stream or has a payload; the
caller saves a stream's blocks (`unsaved`) before it overwrites them. Knows no llama.cpp.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from antiphon.engine.kvstate import Payload

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
    """All streams of a context, and the payloads beside them."""

    def __init__(self, num_streams: int, max_spare_blocks: int) -> None:
        self.all = [Stream(i) for i in range(num_streams)]
        self._by_sequence: dict[int, Stream] = {}
        self._holders: dict[int, list[Stream]] = {}  # kept block -> streams that hold it
        self._saved: dict[int, Payload] = {}  # kept block -> payload
        self._spare: OrderedDict[int, None] = OrderedDict()  # of those the ones a stream holds, oldest first
        self._max_spare_blocks = max_spare_blocks

    def of(self, sequence: int) -> Stream:
        return self._by_sequence[sequence]

    def payload(self, block: int) -> Payload | None:
        """The block's payload, if there is one."""
        if block in self._spare:
            self._spare.move_to_end(block)
        return self._saved.get(block)

    def save(self, block: int, payload: Payload) -> None:
        """Hold a kept block's payload, until `trim` finds it spare or the block is dropped."""
        self._saved[block] = payload
        if block in self._holders:
            self._spare[block] = None

    def trim(self) -> None:
        """Let go of the oldest spare payloads that are too many."""
        while len(self._spare) > self._max_spare_blocks:
            block, _ = self._spare.popitem(last=False)
            del self._saved[block]

    def holder(self, blocks: Iterable[int]) -> Stream | None:
        """The stream that holds most of these blocks; None where no stream holds any."""
        counts = Counter(stream.index for block in blocks for stream in self._holders.get(block, ()))
        return self.all[counts.most_common(1)[0][0]] if counts else None

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
            if b != NOTHING and b not in self._saved and self._holders[b] == [stream]
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
        if block in self._saved:
            self._spare[block] = None

    def vacate(self, sequence: int) -> Stream | None:
        """The sequence has ended. Returns its stream, which keeps its blocks; None if it had none."""
        stream = self._by_sequence.pop(sequence, None)
        if stream is not None:
            stream.sequence = None
        return stream

    def drop(self, block: int) -> None:
        """Nobody will ask for this block again."""
        self._saved.pop(block, None)
        self._spare.pop(block, None)
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
            self._spare.pop(block, None)
