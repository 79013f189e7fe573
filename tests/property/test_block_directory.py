"""The directory of blocks against the truth, whatever happens to the news on their way.

Workers store and evict blocks in two tiers, restart and leave; what they say is dropped, doubled and
delivered in any order; the engine's block manager is the real one. When the news flow again, the
directory holds exactly what the workers hold.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import Tier
from antiphon.core.wire import Blocks, decode_up, encoder, pack_keys, unpack_keys
from antiphon.engine.blocks import BlockManager
from antiphon.kv.events import Change, Directory
from antiphon.router.directory import RESYNC_AGAIN_S, BlockDirectory
from antiphon.worker.blocknews import BlockFeed

NUM_REPLICAS, NUM_NUMBERS = 2, 6  # few, so that they meet often
REPLICAS = st.integers(0, NUM_REPLICAS - 1)
NUMBERS = st.lists(st.integers(0, NUM_NUMBERS - 1), min_size=1, max_size=4)
MOST_BLOCKS = 1000


def hash_of(number: int) -> BlockHash:
    return number.to_bytes(8, "little") + bytes(24)


def key_of(number: int) -> int:
    return unpack_keys(pack_keys([hash_of(number)]))[0]


class Chain(list[int]):
    """A prompt of these keys."""

    def upto(self, count: int) -> list[int]:
        return self


class Worker:
    """A worker's side: an engine with few blocks, a host tier, and the feed to one gateway."""

    def __init__(self) -> None:
        self.directory = Directory(most_hashes=24)
        self.blocks = BlockManager(4, most_changes=3)
        self.host: set[int] = set()
        self.feed = BlockFeed(self.directory, part_hashes=5)

    def compute(self, numbers: list[int]) -> None:
        """A sequence computes these blocks, alone or after another one did, and ends."""
        taken = self.blocks.allocate(len(numbers), [])
        self.blocks.release(
            [self.blocks.register(b, hash_of(n)) for b, n in zip(taken, numbers, strict=True)]
        )

    def note(self) -> None:
        """What the engine thread does at a step border."""
        changes = self.blocks.take_changes()
        if changes is None:
            self.directory.replace(Tier.ENGINE, self.blocks.hashes())
        else:
            self.directory.record(Change.REMOVED, Tier.ENGINE, changes.dropped)
            self.directory.record(Change.STORED, Tier.ENGINE, changes.named)

    def keep(self, numbers: list[int]) -> None:
        new = [n for n in dict.fromkeys(numbers) if n not in self.host]
        self.host.update(new)
        self.directory.record(Change.STORED, Tier.HOST, [hash_of(n) for n in new])

    def evict(self, numbers: list[int]) -> None:
        gone = [n for n in dict.fromkeys(numbers) if n in self.host]
        self.host.difference_update(gone)
        self.directory.record(Change.REMOVED, Tier.HOST, [hash_of(n) for n in gone])

    @property
    def held(self) -> set[int]:
        return {key_of(n) for n in self.host} | set(unpack_keys(pack_keys(self.blocks.hashes())))

    def said(self) -> list[bytes]:
        """All that it has to say."""
        messages = []
        while (message := self.feed.take()) is not None:
            messages.append(encoder.encode(message))
        return messages


class DirectoryMachine(RuleBasedStateMachine):
    on_the_way = Bundle("on_the_way")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.directory = BlockDirectory(MOST_BLOCKS)
        self.workers: dict[int, Worker] = {}

    @initialize()
    def start_all(self) -> None:
        for replica in range(NUM_REPLICAS):
            self.start(replica)

    @rule(replica=REPLICAS)
    def start(self, replica: int) -> None:
        """It starts, or crashes and starts again."""
        self.workers[replica] = Worker()
        self.directory.join(replica, self.workers[replica].directory.life, self.now)

    @rule(replica=REPLICAS)
    def leave(self, replica: int) -> None:
        self.workers.pop(replica, None)
        self.directory.leave(replica)

    @rule(replica=REPLICAS, numbers=NUMBERS, is_noted=st.booleans())
    def compute(self, replica: int, numbers: list[int], is_noted: bool) -> None:
        if replica in self.workers:
            self.workers[replica].compute(numbers)
            if is_noted:
                self.workers[replica].note()

    @rule(replica=REPLICAS, numbers=NUMBERS, is_kept=st.booleans())
    def change_host(self, replica: int, numbers: list[int], is_kept: bool) -> None:
        if replica in self.workers:
            worker = self.workers[replica]
            worker.keep(numbers) if is_kept else worker.evict(numbers)

    @rule(target=on_the_way, replica=REPLICAS)
    def say(self, replica: int) -> list[tuple[int, bytes]]:
        """What a worker says goes on its way."""
        worker = self.workers.get(replica)
        return [(replica, message) for message in worker.said()] if worker is not None else []

    @rule(messages=on_the_way, backwards=st.booleans(), skip=st.integers(0, 4))
    def deliver(self, messages: list[tuple[int, bytes]], backwards: bool, skip: int) -> None:
        """It arrives: not for the first time perhaps, in the wrong order, or in part."""
        for at, (replica, message) in enumerate(reversed(messages) if backwards else messages):
            if at != skip:
                self.pass_on(replica, message)

    @rule(messages=consumes(on_the_way))
    def deliver_last(self, messages: list[tuple[int, bytes]]) -> None:
        for replica, message in messages:
            self.pass_on(replica, message)

    @rule(messages=consumes(on_the_way))
    def lose(self, messages: list[tuple[int, bytes]]) -> None:
        """It never arrives."""

    @rule(seconds=st.sampled_from([0.1, RESYNC_AGAIN_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=REPLICAS)
    def reach(self, replica: int) -> None:
        """What it says arrives at once, as it nearly always does."""
        if replica in self.workers:
            for message in self.workers[replica].said():
                self.pass_on(replica, message)

    @rule()
    def flow_again(self) -> None:
        """From here on all arrives: each worker says one thing more, and the directory tells the truth."""
        self.now += RESYNC_AGAIN_S
        for replica, worker in self.workers.items():
            worker.note()
            worker.keep([99])
            worker.evict([99])
            for message in worker.said():
                self.pass_on(replica, message)
            for message in worker.said():  # a snapshot, where one was asked for
                self.pass_on(replica, message)
            assert self.directory.is_complete(replica)
        while self.directory.tidy(3):
            pass
        self.tells_the_truth()

    def teardown(self) -> None:
        self.flow_again()

    def tells_the_truth(self) -> None:
        keys = {key_of(n) for n in range(NUM_NUMBERS)} | {key_of(99)}
        truth = {key: {r for r, w in self.workers.items() if key in w.held} for key in keys}
        for key in keys:
            lookup = self.directory.look_up(Chain([key]), self.now)
            assert {replica for replica, _ in lookup.holders(9, 0.3)} == truth[key]
            assert {replica for replica in range(NUM_REPLICAS) if lookup.local(replica)} == truth[key]
        assert self.directory.num_blocks == sum(len(holders) for holders in truth.values())

    @invariant()
    def counts_are_sound(self) -> None:
        """Never negative, never past the bound, and they add up."""
        known = sum(self.directory.num_blocks_of(replica) for replica in range(NUM_REPLICAS))
        assert 0 <= known <= self.directory.num_blocks <= MOST_BLOCKS

    def pass_on(self, replica: int, data: bytes) -> None:
        message = decode_up(data)
        assert isinstance(message, Blocks)
        if self.directory.take(replica, message, self.now) and replica in self.workers:
            self.workers[replica].feed.resync()


DirectoryMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestBlockDirectory = DirectoryMachine.TestCase
