"""A gateway's directory of blocks, and workers' own directories that feed it message by message."""

from __future__ import annotations

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import Tier
from antiphon.core.wire import Blocks, pack_keys, unpack_keys
from antiphon.kv.events import Change, Directory
from antiphon.router.directory import BlockDirectory
from antiphon.router.lookup import Lookup
from antiphon.worker.blocknews import BlockFeed


def hash_of(number: int) -> BlockHash:
    return number.to_bytes(8, "little") + bytes(24)


def keys(*numbers: int) -> list[int]:
    return unpack_keys(pack_keys(map(hash_of, numbers)))


class Chain:
    """A prompt of these blocks, that notes how far it was asked for."""

    def __init__(self, numbers: list[int] | range) -> None:
        self._keys = keys(*numbers)
        self.asked = 0

    def upto(self, count: int) -> list[int]:
        self.asked = max(self.asked, count)
        return self._keys[: self.asked]


class Told:
    """A directory and what it was told, worker by worker."""

    def __init__(self, **bounds: float) -> None:
        self.directory = BlockDirectory(**bounds)
        self.workers: dict[int, Directory] = {}
        self.feeds: dict[int, BlockFeed] = {}
        self.now = 0.0

    def start(self, replica: int, part_hashes: int = 1000) -> Directory:
        """A worker starts its life and says hello."""
        worker = self.workers[replica] = Directory()
        self.feeds[replica] = BlockFeed(worker, part_hashes)
        self.directory.join(replica, worker.life, self.now)
        self.pass_on(replica)
        return worker

    def stored(self, replica: int, *numbers: int, tier: Tier = Tier.ENGINE) -> None:
        self.workers[replica].record(Change.STORED, tier, [hash_of(n) for n in numbers])
        self.pass_on(replica)

    def removed(self, replica: int, *numbers: int, tier: Tier = Tier.ENGINE) -> None:
        self.workers[replica].record(Change.REMOVED, tier, [hash_of(n) for n in numbers])
        self.pass_on(replica)

    def messages(self, replica: int) -> list[Blocks]:
        """What the worker has to say, taken from it and not passed on."""
        messages = []
        while (message := self.feeds[replica].take()) is not None:
            messages.append(message)
        return messages

    def take(self, replica: int, *messages: Blocks) -> bool:
        """Whether a snapshot is asked for."""
        return any([self.directory.take(replica, message, self.now) for message in messages])

    def pass_on(self, replica: int) -> None:
        if self.take(replica, *self.messages(replica)):
            self.feeds[replica].resync()
            self.pass_on(replica)

    def look_up(self, *numbers: int) -> Lookup:
        return self.directory.look_up(Chain(list(numbers)), self.now)
