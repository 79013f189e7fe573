"""What a worker's `/kv` pages say."""

from __future__ import annotations

import dataclasses

import msgspec

from antiphon.kv.breaker import BreakerState
from antiphon.kv.codec import BadValueReason
from antiphon.kv.gate import Rates
from antiphon.kv.stats import StoreStats
from antiphon.kv.store import FaultKind
from antiphon.worker.kvinfo import KvInfo
from support.kvpages import make_info

WORDS = {
    "read_faults": {FaultKind.TIMEOUT: 1},
    "write_faults": {FaultKind.OUT_OF_MEMORY: 2},
    "bad_values": {BadValueReason.MAC: 3},
    "read_breaker": BreakerState.OPEN,
    "write_breaker": BreakerState.CLOSED,
    "rates": Rates(),
}


def test_page_survives_its_way() -> None:
    """Counts by fault and reason, breakers and rates come back as what they were."""
    numbers = {field.name: 7 for field in dataclasses.fields(StoreStats) if field.name not in WORDS}
    store = StoreStats(**numbers, **WORDS)  # type: ignore[arg-type]  # one figure for all
    info = msgspec.structs.replace(make_info(), stats=dataclasses.replace(make_info().stats, store=store))
    again = msgspec.json.decode(msgspec.json.encode(info), type=KvInfo)
    assert again == info
    assert again.stats.store is not None
    assert again.stats.store.read_faults == {FaultKind.TIMEOUT: 1}
