"""TTLs by depth: always shorter the deeper, never the same for all, always there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv.ttl import TtlPolicy

POLICY = TtlPolicy(first_s=3600.0, depth_s=20.0)


@given(st.integers(0, 5000), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_block_outlives_what_follows_it(index: int, one: bytes, other: bytes) -> None:
    """Whatever the hashes: the parent's TTL is longer, so eviction by TTL takes leaves first."""
    assert POLICY.ttl_ms(index, one) > POLICY.ttl_ms(index + 1, other)


@given(st.integers(0, 10**6), st.binary(min_size=32, max_size=32))
def test_every_block_has_a_ttl(index: int, block_hash: bytes) -> None:
    """However deep: at most the first one's, and the depth takes minutes off an hour, not the hour."""
    assert 3_300_000 < POLICY.ttl_ms(index, block_hash) <= 3_600_000


def test_the_depth_costs_what_is_said() -> None:
    """`depth_s` for each e-fold."""
    assert POLICY.ttl_ms(0, bytes(32)) == 3_600_000
    assert POLICY.ttl_ms(147, bytes(32)) == pytest.approx(3_500_000, abs=100)


def test_blocks_written_together_expire_apart() -> None:
    """The hash spreads TTLs of the same depth."""
    ttls = {POLICY.ttl_ms(0, bytes([first]) + bytes(31)) for first in range(256)}
    assert len(ttls) == 256


@pytest.mark.parametrize("wrong", [(3600.0, 0.0), (3600.0, -1.0), (3600.0, 300.0), (0.0, 1.0)])
def test_a_policy_that_does_not_fall_or_falls_too_far_is_refused(wrong: tuple[float, float]) -> None:
    """A flat or rising curve would evict the middle of chains; a TTL of nothing is no TTL."""
    with pytest.raises(ValueError, match="TTL"):
        TtlPolicy(*wrong)
