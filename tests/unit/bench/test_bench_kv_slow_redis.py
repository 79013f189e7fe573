"""bench/kv_slow_redis.py: blocks of a real model's size that a scripted engine can still read."""

from __future__ import annotations

from bench.kv_slow_redis import AILMENTS, WELL, Settings, Suffering, padded_runner

from antiphon.engine.runner import Chunk

SETTINGS = Settings(token_s=0.0, block_kib=4)


def test_padded_blocks_come_back_as_they_were() -> None:
    """Exported, imported elsewhere, exported again: the same bytes, of the size that was asked for."""
    one, other = padded_runner(SETTINGS), padded_runner(SETTINGS)
    one.open(1, [])
    one.run([Chunk(1, 0, list(range(16)), wants_logits=True)])
    one.keep(1, 0, 7)
    (payload,) = one.export_blocks([7])
    assert len(payload) == one.block_bytes == 4096
    other.import_block(3, memoryview(payload))
    assert other.export_blocks([3]) == [payload]


def test_a_row_counts_decisions() -> None:
    """Worst, median, healing, and how often the tiers decided what."""
    seen = Suffering([0.01, -0.3, 0.04], ["late", "fetched", "late"], 0.7)
    assert seen.row() == {
        "beyond recompute, most, ms": 40.0,
        "median, ms": 10.0,
        "healed, s": 0.7,
        "decisions": "2 late, 1 fetched",
    }


def test_every_fault_has_a_row_of_its_own() -> None:
    """Names are what the results are kept by."""
    names = [ailment.name for ailment in (WELL, *AILMENTS)]
    assert len(set(names)) == len(names)
