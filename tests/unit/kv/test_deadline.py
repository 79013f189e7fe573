"""A call's time in all."""

from __future__ import annotations

import pytest

from antiphon.kv.deadline import Deadline
from antiphon.kv.store import FaultKind, StoreFault


def test_what_is_left_shrinks_to_a_fault() -> None:
    """It is less at each look, and none is a TIMEOUT that names the whole time."""
    deadline = Deadline(1000.0)
    first = deadline.left_s()
    assert 0 < deadline.left_s() <= first <= 1000.0
    with pytest.raises(StoreFault, match=r"within 0 s") as raised:
        Deadline(0.0).left_s()
    assert raised.value.kind is FaultKind.TIMEOUT
