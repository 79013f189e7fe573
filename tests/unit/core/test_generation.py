"""What generations and reports say of themselves."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.generation import Generation, KvReport, Sampling

TENANTS = st.text(max_size=12)


def generation(tenant: str, scope: bytes = b"") -> Generation:
    sampling = Sampling(seed=1, max_tokens=1)
    return Generation(id="g", model="m", sampling=sampling, tenant=tenant, scope=scope)


@given(one=TENANTS, two=TENANTS)
def test_without_a_scope_every_tenant_has_its_own(one: str, two: str) -> None:
    """Two names never share, and no name is the public scope."""
    scopes = [generation(name).kv_scope for name in (one, two)]
    assert (scopes[0] == scopes[1]) == (one == two)
    assert PUBLIC_SCOPE not in scopes


def test_the_gateways_scope_counts_whatever_the_tenant_is_called() -> None:
    """The name is for people; what separates is what the gateway derived."""
    assert generation("a", b"s" * 32).kv_scope == generation("b", b"s" * 32).kv_scope == b"s" * 32


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (
            KvReport(14, 6, 22, 8, 16_000_000, 0.009, 0.410, "fetched"),
            "14 local, 6 host, 22 redis, 8 computed; fetched 16 MB in 9 ms, saved 410 ms",
        ),
        (KvReport(3, 0, 0, 2), "3 local, 0 host, 0 redis, 2 computed"),
        (KvReport(0, 0, 0, 8, decision="slower"), "0 local, 0 host, 0 redis, 8 computed; slower"),
        (
            KvReport(0, 0, 1, 8, 737_280, 0.05, 0.02, "late"),
            "0 local, 0 host, 1 redis, 8 computed; fetched 0.7 MB in 50 ms, saved 20 ms; late",
        ),
    ],
)
def test_a_report_reads_as_a_log_line(report: KvReport, text: str) -> None:
    """Where blocks came from, what that cost and, where the store was no help, why."""
    assert str(report) == text


def test_a_report_survives_the_wire_in_few_bytes() -> None:
    """It is sent once an answer, as an array."""
    report = KvReport(14, 6, 22, 8, 16_000_000, 0.009, 0.410, "fetched")
    data = msgspec.msgpack.encode(report)
    assert msgspec.msgpack.decode(data, type=KvReport) == report
    assert len(data) < 50
