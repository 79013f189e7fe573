"""kv.breakeven: the arithmetic against figures that others published and against itself."""

from __future__ import annotations

import pytest

from antiphon.kv.breakeven import DEPLOYMENTS, Deployment


def named(part: str) -> Deployment:
    """The one deployment whose name holds this."""
    (found,) = [d for d in DEPLOYMENTS if part in d.name]
    return found


@pytest.mark.parametrize(
    ("part", "gigabytes_per_s"),
    [("405B", 6.0), ("70B", 11.0), ("8B BF16, 1 H100", 4.8)],
)
def test_short_prefixes_agree_with_the_simple_form(part: str, gigabytes_per_s: float) -> None:
    """Without attention the break-even is prefill rate × KV bytes: figures worked out by hand."""
    assert named(part).break_even_bytes_per_s(16) / 1e9 == pytest.approx(gigabytes_per_s, rel=0.03)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d.name)
def test_longer_prefixes_need_less_bandwidth(deployment: Deployment) -> None:
    """Attention makes computing dearer with length, fetching not."""
    needed = [deployment.break_even_bytes_per_s(n) for n in (512, 2048, 8192, 32768, 131072)]
    assert needed == sorted(needed, reverse=True)


def test_70b_at_8k_is_of_the_published_size() -> None:
    """Mooncake's paper puts 70B at 8192 tokens on eight H800 near 19 GB/s at full arithmetic peak."""
    at_peak = named("70B").break_even_bytes_per_s(8192) / 0.6
    assert 15e9 < at_peak < 21e9


def test_the_built_in_model_on_a_laptop_needs_little() -> None:
    """One Redis socket delivers over a gigabyte a second; this needs less than a fiftieth of that."""
    assert named("SmolLM2").break_even_bytes_per_s(2048) < 20e6
