"""bench/kv_evict.py: its traffic, and how it counts what is lost."""

from __future__ import annotations

from typing import cast

import pytest
from bench.kv_evict import Settings, Side, Traffic
from bench.redisserver import RedisServer

from antiphon.kv.cache import KvCache
from support.kvchains import CODEC, chain

SETTINGS = Settings(least_blocks=4, most_blocks=10, share_going_on=0.5, pause_s=1.0)


class Held:
    """A server that says it holds these keys."""

    def __init__(self, keys: set[str]) -> None:
        self._keys = keys

    def keys(self) -> set[str]:
        return self._keys


def test_traffic_is_the_same_every_time() -> None:
    """All sides, and all runs, see the same turns."""
    one, other = Traffic(SETTINGS), Traffic(SETTINGS)
    for number in range(200):
        first, second = one.turn(number / 20), other.turn(number / 20)
        assert (list(first[0]), first[1]) == (list(second[0]), second[1])


def test_conversations_begin_and_go_on() -> None:
    """A new one has 4 to 10 blocks and nothing old; one that goes on has 2 to 8 more than it had."""
    traffic, lengths = Traffic(SETTINGS), {}
    num_going_on = 0
    for number in range(400):
        blocks, num_old = traffic.turn(number / 20)
        chain_number = blocks[0].token_ids[0]
        assert num_old == lengths.get(chain_number, 0)
        assert (2 <= len(blocks) - num_old <= 8) if num_old else (4 <= len(blocks) <= 10)
        assert [block.index for block in blocks] == list(range(len(blocks)))
        lengths[chain_number] = len(blocks)
        num_going_on += num_old > 0
    assert 100 < num_going_on < 300
    hashes = [block.hash for blocks in traffic.chains for block in blocks]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(("missing", "share"), [([], 0.0), ([4], 0.0), ([2], 0.5), ([0], 1.0)])
def test_lost_is_what_lies_behind_a_hole(missing: list[int], share: float) -> None:
    """Held and not reachable from the front, as a share of what is held."""
    blocks = chain(5)
    keys = {CODEC.key(block) for block in blocks if block.index not in missing}
    side = Side(cast(RedisServer, Held(keys)), cast(KvCache, None), CODEC)
    side.look([blocks])
    assert side.lost == [share]
    assert side.held == [5 - len(missing)]
