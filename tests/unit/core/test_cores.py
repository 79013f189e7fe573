"""core.cores: what the scheduler would let us use."""

from __future__ import annotations

import os

import pytest

from antiphon.core.cores import usable_cores


def test_only_the_cores_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process bound to some cores uses those, whatever else the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores() == 2


def test_where_the_system_does_not_say_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No affinity and no count: one core is certain."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
