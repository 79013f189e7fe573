"""The host tier: what it returns, to whom, and what goes first."""

from __future__ import annotations

import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.core.scope import tenant_part_of
from antiphon.kv.events import Change, Directory
from antiphon.kv.hosttier import ENTRY_BYTES, HostSettings, HostTier
from support.kvchains import BLOCK_BYTES, chain, payload_of, with_payloads
from support.kvvalues import OTHER_SCOPE, SCOPE

ENTRY = BLOCK_BYTES + ENTRY_BYTES


class Host:
    """A tier for so many blocks, on a clock of its own."""

    def __init__(self, num_blocks: int, *, public_s: float = 3600.0, hot_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.directory = Directory()
        settings = HostSettings(num_blocks * ENTRY, depth_s=2.0, public_s=public_s, hot_s=hot_s)
        self.tier = HostTier(settings, self.clock, self.directory)

    def put(self, blocks: list[KvBlock], *, after_s: float = 100.0) -> None:
        self.clock.advance(after_s)
        self.tier.put(with_payloads(blocks))

    def held(self, blocks: list[KvBlock]) -> list[int]:
        """Indices of those that are here."""
        return [block.index for block in blocks if block.hash in self.tier]


def test_it_returns_what_was_put() -> None:
    """Payloads of the front of a chain, up to the first block that is not here."""
    host, blocks = Host(10), chain(5)
    host.put(blocks[:2] + blocks[3:])
    assert host.tier.run(blocks) == [payload_of(block) for block in blocks[:2]]
    assert host.tier.run(blocks[3:]) == [payload_of(block) for block in blocks[3:]]
    assert host.tier.run(chain(5, start=1000)) == []


def test_another_scope_gets_nothing() -> None:
    """Even under the right hash: the scope is looked at as well."""
    host, (block,) = Host(10), chain(1)
    host.put([block])
    thief = KvBlock(block.hash, block.index, block.token_ids, OTHER_SCOPE)
    assert host.tier.run([thief]) == []
    assert host.tier.run(chain(1, scope=OTHER_SCOPE)) == []
    assert len(host.tier.run([block])) == 1


def test_the_budget_holds() -> None:
    """What no longer fits goes: here the chain used longest ago."""
    host, old, new = Host(4), chain(3), chain(3, start=1000)
    host.put(old)
    host.put(new)
    assert host.tier.num_bytes == 4 * ENTRY
    assert host.held(new) == [0, 1, 2]
    assert host.held(old) == [0]
    assert host.tier.num_evicted == 2


def test_use_keeps() -> None:
    """The chain that was looked up last stays."""
    host, one, other, new = Host(4), chain(2), chain(2, start=1000), chain(2, start=2000)
    host.put(one)
    host.put(other)
    host.clock.advance(100.0)
    host.tier.run(one)
    host.put(new)
    assert host.held(one) == [0, 1]
    assert host.held(other) == []


def test_blocks_that_the_engine_uses_stay_too() -> None:
    """A prompt whose front lies in the engine touches the copies here: its tail would be lost behind them."""
    host, one, other, new = Host(4), chain(2), chain(2, start=1000), chain(2, start=2000)
    host.put(one)
    host.put(other)
    host.clock.advance(100.0)
    host.tier.touch(one)
    host.put(new)
    assert host.held(one) == [0, 1]


def test_leaves_go_before_roots() -> None:
    """Of blocks used together, the deepest first."""
    host, blocks = Host(6), chain(6)
    host.put(blocks)
    host.put(chain(3, start=1000))
    assert host.held(blocks) == [0, 1, 2]


def test_leaves_go_before_roots_though_they_are_younger() -> None:
    """An answer's blocks are put after the prompt's: they depend on them, so they go first."""
    host, blocks = Host(4), chain(4)
    for block in blocks:
        host.put([block], after_s=1.5)
    host.put(chain(2, start=1000), after_s=1.5)
    assert host.held(blocks) == [0, 1]


def test_a_chain_that_does_not_fit_keeps_its_front() -> None:
    """The useful end of it."""
    host, blocks = Host(3), chain(5)
    host.put(blocks)
    assert host.held(blocks) == [0, 1, 2]


def test_public_blocks_stay_longer_but_not_for_ever() -> None:
    """An operator's prompt outlives newer chains, until its pin has worn off."""
    host = Host(2, public_s=1000.0)
    public = chain(1, num_public=1)
    host.put(public)
    host.put(chain(2, start=1000))
    assert host.held(public) == [0]
    host.put(chain(2, start=2000), after_s=1100.0)
    assert host.held(public) == []


def test_hot_blocks_stay_longer() -> None:
    """Each use adds to it, up to a bound."""
    host = Host(2, hot_s=1000.0)
    hot = chain(1)
    host.put(hot)
    host.tier.run(hot)
    host.put(chain(2, start=1000))
    assert host.held(hot) == [0]
    for _ in range(100):
        host.tier.run(hot)
    host.put(chain(2, start=2000), after_s=8100.0)
    assert host.held(hot) == []


def test_what_is_here_already_is_not_stored_twice() -> None:
    """Nor counted twice; the second time counts as a use."""
    host, one, other = Host(2), chain(1), chain(1, start=1000)
    host.put(one)
    host.put(other)
    host.put(one)
    assert host.tier.num_bytes == 2 * ENTRY
    host.put(chain(1, start=2000))
    assert host.held(one) == [0]


@pytest.mark.parametrize("budget", [0, BLOCK_BYTES])
def test_a_payload_above_the_budget_is_not_taken(budget: int) -> None:
    """A tier that is off, or too small for one block, holds nothing."""
    tier = HostTier(HostSettings(budget), VirtualClock(), Directory())
    assert not tier.can_hold(BLOCK_BYTES)
    tier.put(with_payloads(chain(2)))
    assert len(tier) == 0
    assert tier.num_bytes == 0


def test_the_directory_hears_of_every_change() -> None:
    """Stored and removed, so that it knows what is here."""
    host, blocks = Host(3), chain(3)
    host.put(blocks)
    host.put(chain(1, start=1000))
    events = host.directory.after(0)
    assert events is not None
    assert [event.change for event in events] == [Change.STORED, Change.STORED, Change.REMOVED]
    assert host.directory.snapshot().hashes[Tier.HOST] == {
        block.hash for block in blocks[:2] + chain(1, start=1000)
    }


def test_forgotten_tenants_leave_nothing() -> None:
    """Blocks of all narrowings of their scope go and are told; others and public ones stay; room is room."""
    host = Host(20)
    mine, narrowed = chain(3, num_public=1), chain(2, start=500, scope=tenant_part_of(SCOPE) + b"x" * 16)
    theirs = chain(2, start=1000, scope=OTHER_SCOPE)
    for blocks in (mine, narrowed, theirs):
        host.put(blocks)
    before = host.directory.snapshot().hashes[Tier.HOST]
    host.tier.forget({tenant_part_of(SCOPE)})
    left = {mine[0].hash, *(block.hash for block in theirs)}
    assert [host.held(blocks) for blocks in (mine, narrowed, theirs)] == [[0], [], [0, 1]]
    assert host.tier.num_bytes == 3 * ENTRY
    assert host.directory.snapshot().hashes[Tier.HOST] == left < before
    host.put(chain(20, start=5000))  # the order of what goes first is whole
    assert host.tier.num_bytes <= 20 * ENTRY
