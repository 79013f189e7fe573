"""TTLs by depth: always shorter the deeper, never the same for all, never below the least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv.ttl import TtlPolicy

POLICY = TtlPolicy(first_s=3600.0, least_s=600.0, half_blocks=64)


@given(st.integers(0, 5000), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_block_outlives_what_follows_it(index: int, one: bytes, other: bytes) -> None:
    """Whatever the hashes: the parent's TTL is longer, so eviction by TTL takes leaves first."""
    assert POLICY.ttl_ms(index, one) > POLICY.ttl_ms(index + 1, other)


@given(st.integers(0, 10**6), st.binary(min_size=32, max_size=32))
def test_a_ttl_stays_within_its_bounds(index: int, block_hash: bytes) -> None:
    """Between the least and the first."""
    assert 600_000 <= POLICY.ttl_ms(index, block_hash) <= 3_600_000


def test_half_of_the_way_lies_where_it_is_said() -> None:
    """Block `half_blocks` lives in the middle between both bounds."""
    assert POLICY.ttl_ms(64, bytes(32)) == 2_100_000


def test_blocks_written_together_expire_apart() -> None:
    """The hash spreads TTLs of the same depth."""
    ttls = {POLICY.ttl_ms(0, bytes([first]) + bytes(31)) for first in range(256)}
    assert len(ttls) == 256


@pytest.mark.parametrize("wrong", [(600.0, 600.0, 64), (600.0, 0.0, 64), (600.0, 60.0, 0)])
def test_a_policy_that_does_not_fall_is_refused(wrong: tuple[float, float, int]) -> None:
    """A flat or rising curve would evict the middle of chains."""
    with pytest.raises(ValueError, match="TTL"):
        TtlPolicy(*wrong)
