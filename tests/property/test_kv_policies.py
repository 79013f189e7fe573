"""Policies of the KV tiers against plain models: the host tier's order and bound, the gate's direction."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from antiphon.core.clock import VirtualClock
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.kv.events import Directory
from antiphon.kv.gate import Ask, Gate, GateSettings, Rates, judge
from antiphon.kv.hosttier import ENTRY_BYTES, HostSettings, HostTier
from support.kvchains import chain, payload_of

seconds = st.floats(1e-5, 10.0)
rates = st.builds(
    Rates,
    rtt_s=seconds,
    byte_s=st.floats(1e-11, 1e-5),
    import_byte_s=st.floats(1e-11, 1e-7),
    hit_share=st.floats(0.02, 1.0),
    prefill_tokens_per_s=st.floats(1.0, 1e6),
)
asks = st.builds(
    Ask,
    num_blocks=st.integers(1, 4096),
    block_bytes=st.integers(1, 2**22),
    block_tokens=st.integers(16, 256),
    queued_bytes=st.integers(0, 2**30),
)
SETTINGS = GateSettings()


@given(asks, rates, st.floats(1.0, 100.0), st.floats(1.0, 100.0), st.integers(0, 2**30))
def test_a_slower_store_never_turns_no_into_yes(
    ask: Ask, known: Rates, longer: float, slower: float, queued: int
) -> None:
    """More round trip, less bandwidth, more bytes before it: each only speaks for computing."""
    worse = replace(known, rtt_s=known.rtt_s * longer, byte_s=known.byte_s * slower)
    later = replace(ask, queued_bytes=ask.queued_bytes + queued)
    assert judge(ask, known, SETTINGS).fetch or not judge(later, worse, SETTINGS).fetch


@given(asks, rates, st.floats(1.0, 100.0), st.floats(0.0, 1.0))
def test_a_faster_engine_or_rarer_hits_never_turn_no_into_yes(
    ask: Ask, known: Rates, faster: float, rarer: float
) -> None:
    """The same from the other side."""
    worse = replace(
        known,
        prefill_tokens_per_s=known.prefill_tokens_per_s * faster,
        hit_share=max(known.hit_share * rarer, 0.02),
    )
    assert judge(ask, known, SETTINGS).fetch or not judge(ask, worse, SETTINGS).fetch


@given(
    asks,
    rates,
    st.lists(st.tuples(st.integers(1, 64), seconds, st.floats(0.0, 5.0)), min_size=1, max_size=10),
)
def test_slower_fetches_never_turn_no_into_yes(
    ask: Ask, known: Rates, fetches: list[tuple[int, float, float]]
) -> None:
    """Two histories of the same fetches, one slower in each: its gate fetches less, never more."""
    one, slower = Gate(SETTINGS, known), Gate(SETTINGS, known)
    for num_blocks, took_s, more_s in fetches:
        one.observe_fetch(num_blocks, num_blocks, num_blocks * ask.block_bytes, took_s)
        slower.observe_fetch(num_blocks, num_blocks, num_blocks * ask.block_bytes, took_s + more_s)
    assert one.judge(ask).fetch or not slower.judge(ask).fetch


BUDGET_BLOCKS = 8
POOL = [chain(5), chain(5, start=1000), chain(4, start=2000, num_public=2), chain(1, start=3000)]


@dataclass
class Known:
    """What the model remembers of a block."""

    block: KvBlock
    rank_s: float
    num_hits: int = 0


class HostMachine(RuleBasedStateMachine):
    """The host tier against a list that is sorted whenever something must go."""

    @initialize()
    def start(self) -> None:
        self.clock = VirtualClock()
        self.directory = Directory()
        budget = BUDGET_BLOCKS * (100 + ENTRY_BYTES)
        self.settings = HostSettings(budget, depth_s=2.0, public_s=50.0, hot_s=7.0)
        self.tier = HostTier(self.settings, self.clock, self.directory)
        self.model: dict[bytes, Known] = {}

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(number=st.integers(0, len(POOL) - 1), first=st.integers(0, 4), num=st.integers(1, 5))
    def put(self, number: int, first: int, num: int) -> None:
        blocks = POOL[number][first : first + num]
        self.tier.put([(block, payload_of(block, 100)) for block in blocks])
        for block in blocks:
            known = self.model.setdefault(block.hash, Known(block, float("-inf")))
            known.rank_s = max(known.rank_s, self.rank_s(block, known.num_hits))
        while len(self.model) > BUDGET_BLOCKS:
            del self.model[min(self.model.values(), key=order).block.hash]

    @rule(number=st.integers(0, len(POOL) - 1))
    def run(self, number: int) -> None:
        found = self.tier.run(POOL[number])
        expected = []
        for block in POOL[number]:
            known = self.model.get(block.hash)
            if known is None:
                break
            known.num_hits += 1
            known.rank_s = max(known.rank_s, self.rank_s(block, known.num_hits))
            expected.append(payload_of(block, 100))
        assert found == expected

    @rule(number=st.integers(0, len(POOL) - 1))
    def touch(self, number: int) -> None:
        self.tier.touch(POOL[number])
        for block in POOL[number]:
            if block.hash in self.model:
                known = self.model[block.hash]
                known.rank_s = max(known.rank_s, self.rank_s(block, known.num_hits))

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.tier.num_bytes <= self.settings.budget_bytes
        assert {block.hash for blocks in POOL for block in blocks if block.hash in self.tier} == set(
            self.model
        )
        assert self.directory.snapshot().hashes[Tier.HOST] == set(self.model)

    def rank_s(self, block: KvBlock, num_hits: int) -> float:
        rank_s = self.clock.now() - 2.0 * block.index + 7.0 * min(num_hits, 8)
        return rank_s + 50.0 if block.scope == b"public" else rank_s


def order(known: Known) -> tuple[float, int, bytes]:
    """The lowest goes first."""
    return known.rank_s, -known.block.index, known.block.hash


TestHostTier = HostMachine.TestCase
TestHostTier.__doc__ = "Whatever is put, used and waited for: what stays is what the model says."
