"""Streams: which stream is chosen, what must be saved before it is overwritten."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.engine.streams import NOTHING, Streams


def fill(streams: Streams, sequence: int, blocks: list[int]) -> None:
    """A sequence comes, keeps these blocks and leaves."""
    stream = streams.choose([])
    streams.occupy(stream, sequence, [], 4)
    for index, block in enumerate(blocks):
        streams.set(stream, index, block)
    streams.vacate(sequence)


def test_the_lowest_free_stream_is_taken() -> None:
    """Low streams keep the steps in one piece."""
    streams = Streams(3, 2)
    streams.occupy(streams.all[0], 1, [], 4)
    assert streams.choose([]).index == 1


def test_a_conversation_comes_back_to_its_stream() -> None:
    """Where enough of it lies in place, a higher stream is better than a copy."""
    streams = Streams(3, 2)
    streams.occupy(streams.all[0], 9, [], 4)
    blocks = list(range(100, 110))
    fill(streams, 1, blocks)
    streams.vacate(9)
    assert streams.choose(blocks).index == 1
    assert streams.choose(blocks[:3]).index == 0, "three blocks are copied sooner than a gap is worth"


def test_only_what_is_nowhere_else_must_be_saved() -> None:
    """Blocks with a second holder or a payload may be overwritten."""
    streams = Streams(2, 2)
    fill(streams, 1, [100, 101, 102])
    stream = streams.all[0]
    streams.save(100, b"payload")
    streams.occupy(streams.all[1], 2, [101], 4)
    assert streams.unsaved(stream, 0) == [102]
    assert streams.unsaved(stream, 3) == []


def test_a_dropped_block_leaves_a_hole_not_a_shift() -> None:
    """The others keep their places; the stream matches up to the hole."""
    streams = Streams(1, 2)
    fill(streams, 1, [100, 101, 102])
    streams.drop(101)
    assert streams.all[0].blocks == [100, NOTHING, 102]
    assert streams.all[0].num_matching([100, 101, 102]) == 1
    assert streams.holder([101]) is None


def test_vacating_twice_is_fine() -> None:
    """Closing a sequence that has no stream finds nothing."""
    assert Streams(1, 2).vacate(5) is None


def test_payloads_of_blocks_in_streams_are_bounded() -> None:
    """The oldest goes; one that no stream holds any more stays whatever the bound."""
    streams = Streams(1, 2)
    fill(streams, 1, [100, 101, 102, 103])
    for block in (100, 101, 102, 103):
        streams.save(block, b"x")
    streams.payload(100)
    streams.trim()
    assert [streams.payload(b) is not None for b in (100, 101, 102, 103)] == [True, False, False, True]
    streams.occupy(streams.all[0], 2, [], 4)
    for block in (200, 201, 202):
        streams.save(block, b"x")
    streams.trim()
    assert all(streams.payload(b) is not None for b in (100, 103, 200, 201, 202))


def test_the_stream_with_most_of_the_blocks_is_read() -> None:
    """Reading costs a whole stream: one that holds all of them is better than two."""
    streams = Streams(2, 2)
    fill(streams, 1, [100, 101])
    streams.occupy(streams.all[0], 8, [100, 101], 4)
    streams.occupy(streams.all[1], 9, [100, 101, 102], 4)
    assert streams.holder([100, 101, 102]) is streams.all[1]


class StreamsMachine(RuleBasedStateMachine):
    """Any life: a kept block always has a holder or a payload, if the caller saves what it must."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = Streams(3, 2)
        self.kept: set[int] = set()
        self.dropped: set[int] = set()
        self.open: list[int] = []
        self.counter = 0

    @rule(data=st.data())
    @precondition(lambda self: len(self.open) < 3)
    def begin(self, data: st.DataObject) -> None:
        """Open with some kept blocks, saving first what the stream alone holds."""
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True)) if self.kept else []
        stream = self.streams.choose(blocks)
        keep = stream.num_matching(blocks)
        for block in self.streams.unsaved(stream, keep if keep == len(blocks) else 0):
            self.streams.save(block, b"x")
        self.counter += 1
        self.streams.occupy(stream, self.counter, blocks, 4)
        self.streams.trim()
        self.open.append(self.counter)

    @rule(data=st.data(), count=st.integers(1, 4))
    @precondition(lambda self: self.open)
    def keep(self, data: st.DataObject, count: int) -> None:
        """An open sequence's next blocks become known."""
        stream = self.streams.of(data.draw(st.sampled_from(self.open)))
        for _ in range(count):
            self.counter += 1
            self.streams.set(stream, len(stream.blocks), self.counter)
            self.kept.add(self.counter)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def end(self, data: st.DataObject) -> None:
        """A sequence leaves."""
        sequence = data.draw(st.sampled_from(self.open))
        self.open.remove(sequence)
        assert self.streams.vacate(sequence) is not None

    @rule(data=st.data())
    @precondition(lambda self: self.kept)
    def copy_out(self, data: st.DataObject) -> None:
        """A block's payload is held beside its stream, until there are too many of them."""
        self.streams.save(data.draw(st.sampled_from(sorted(self.kept))), b"x")
        self.streams.trim()

    @rule()
    def arrive(self) -> None:
        """A block comes from elsewhere: its payload is all there is of it."""
        self.counter += 1
        self.kept.add(self.counter)
        self.streams.save(self.counter, b"x")

    @rule(data=st.data())
    @precondition(lambda self: self.kept)
    def drop(self, data: st.DataObject) -> None:
        """A block is evicted."""
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.kept.discard(block)
        self.dropped.add(block)
        self.streams.drop(block)

    @invariant()
    def every_kept_block_is_somewhere(self) -> None:
        """In a stream at the index that stream says, or saved."""
        for block in self.kept:
            holder = self.streams.holder([block])
            has_payload = self.streams.payload(block) is not None
            assert has_payload or (holder is not None and block in holder.blocks)

    @invariant()
    def nothing_else_is_held(self) -> None:
        """No stream and no payload of a block nobody may ask for."""
        assert {b for s in self.streams.all for b in s.blocks if b != NOTHING} <= self.kept
        assert all(self.streams.payload(block) is None for block in self.dropped)


StreamsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStreamsMachine = StreamsMachine.TestCase
