"""The cost gate: who wins, what it learns, how it explains itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from antiphon.kv.gate import Ask, Gate, GateSettings, Rates, judge

SETTINGS = GateSettings(patience_s=0.04, safety=1.25, most_batch_bytes=16 * 2**20)
RATES = Rates(rtt_s=0.001, byte_s=1e-9, import_byte_s=1e-9, hit_share=1.0, prefill_tokens_per_s=1000.0)
ASK = Ask(num_blocks=10, block_bytes=2**20, block_tokens=32)


def test_both_times_are_sums_of_their_parts() -> None:
    """Fetching: round trip, bytes, import. Computing: tokens at the prefill rate."""
    verdict = judge(ASK, RATES, SETTINGS)
    assert verdict.fetch_s == pytest.approx(0.001 + 10 * 2**20 * 2e-9)
    assert verdict.compute_s == pytest.approx(0.32)
    assert verdict.fetch


def test_bytes_before_them_in_the_queue_count() -> None:
    """The same fetch behind others takes longer by theirs."""
    queued = replace(ASK, queued_bytes=2**20)
    added_s = judge(queued, RATES, SETTINGS).fetch_s - judge(ASK, RATES, SETTINGS).fetch_s
    assert added_s == pytest.approx(2**20 * 1e-9)


def test_misses_cost_round_trips() -> None:
    """Where one of ten is there, nine round trips are in vain for each that is not."""
    rare = judge(ASK, replace(RATES, hit_share=0.1), SETTINGS)
    assert rare.fetch_s - judge(ASK, RATES, SETTINGS).fetch_s == pytest.approx(0.009)


def test_fetching_has_to_win_clearly() -> None:
    """The safety factor decides near the break-even."""
    verdict = judge(ASK, RATES, SETTINGS)
    rate = ASK.num_blocks * ASK.block_tokens / verdict.fetch_s
    assert not judge(ASK, replace(RATES, prefill_tokens_per_s=rate / 1.2), SETTINGS).fetch
    assert judge(ASK, replace(RATES, prefill_tokens_per_s=rate / 1.3), SETTINGS).fetch


def test_what_would_be_cut_off_is_not_begun() -> None:
    """A first block that comes after the patience is over saves nothing, however slow the engine."""
    far = replace(RATES, rtt_s=0.05, prefill_tokens_per_s=1.0)
    assert not judge(ASK, far, SETTINGS).fetch
    assert judge(ASK, far, replace(SETTINGS, patience_s=0.1)).fetch


def test_a_slow_store_is_believed_after_few_samples_and_a_healed_one_too() -> None:
    """Means of logarithms: three samples lead from a thousandth to near the truth, either way."""
    gate = Gate(SETTINGS, RATES)
    for _ in range(4):
        gate.observe_ping(0.5)
    assert gate.rates.rtt_s > 0.25
    for _ in range(4):
        gate.observe_ping(0.001)
    assert gate.rates.rtt_s < 0.002


def test_bytes_before_it_cost_time_but_no_patience() -> None:
    """A run behind others waits for them while they come: it is refused only where computing is faster."""
    behind = replace(ASK, queued_bytes=int(2 * SETTINGS.patience_s / RATES.byte_s))
    slow_engine = replace(RATES, prefill_tokens_per_s=10.0)
    assert judge(behind, slow_engine, SETTINGS).fetch
    assert not judge(behind, replace(RATES, prefill_tokens_per_s=1e5), SETTINGS).fetch


def test_a_fetch_teaches_bandwidth_and_hits() -> None:
    """The round trip is not counted twice."""
    gate = Gate(SETTINGS, RATES)
    for _ in range(20):
        gate.observe_fetch(10, 5, 10**7, 0.001 + 0.02)
    assert gate.rates.byte_s == pytest.approx(2e-9, rel=0.01)
    assert gate.rates.hit_share == pytest.approx(0.5, abs=0.07)
    assert gate.rates.rtt_s == 0.001


def test_a_fetch_in_vain_teaches_the_round_trip() -> None:
    """Nothing came, so its time was the way there and back; hits become less likely, never impossible."""
    gate = Gate(SETTINGS, RATES)
    for _ in range(100):
        gate.observe_fetch(10, 0, 0, 0.004)
    assert gate.rates.rtt_s == pytest.approx(0.004, rel=0.01)
    assert gate.rates.hit_share == 0.02


def test_a_round_trip_longer_than_a_fetch_teaches_no_endless_bandwidth() -> None:
    """Times jitter: a fetch shorter than the round trip still took its bytes some of its time."""
    gate = Gate(SETTINGS, RATES)
    gate.observe_fetch(1, 1, 2**20, 0.0005)
    assert gate.rates.byte_s > 1e-10


def test_cut_off_fetches_close_the_gate() -> None:
    """Three that brought nothing in the time they had, and the next request does not wait."""
    gate = Gate(SETTINGS, replace(RATES, prefill_tokens_per_s=10.0))
    assert gate.judge(ASK).fetch
    for _ in range(3):
        gate.observe_cut(2**20, 0, 0.035)
    assert not gate.judge(ASK).fetch


def test_what_a_cut_off_fetch_brought_counts() -> None:
    """Half of the bytes in the time is a rate like any other."""
    gate = Gate(SETTINGS, RATES)
    for _ in range(20):
        gate.observe_cut(2**22, 2**21, 0.001 + 2**21 * 8e-9)
    assert gate.rates.byte_s == pytest.approx(8e-9, rel=0.01)


def test_batches_shrink_with_the_bandwidth() -> None:
    """Progress has to show within the patience: a third of it a batch, one block at least, 16 MiB at most."""
    gate = Gate(SETTINGS, RATES)
    assert gate.batch_blocks(2**20) == 11
    gate.rates = replace(RATES, byte_s=1e-10)
    assert gate.batch_blocks(2**20) == 16
    gate.rates = replace(RATES, byte_s=1e-8)
    assert gate.batch_blocks(2**20) == 1
    gate.rates = replace(RATES, byte_s=1e-6)
    assert gate.batch_blocks(2**20) == 1


def test_prefill_is_learnt_slowly() -> None:
    """One odd step changes little, many change it."""
    gate = Gate(SETTINGS, RATES)
    gate.observe_prefill(100, 1.0)
    assert 750 < gate.rates.prefill_tokens_per_s < 1000
    for _ in range(100):
        gate.observe_prefill(100, 1.0)
    assert gate.rates.prefill_tokens_per_s == pytest.approx(100, rel=0.01)
    assert gate.compute_s(50) == pytest.approx(0.5, rel=0.01)


def test_the_import_is_learnt() -> None:
    """Seconds a byte; nothing imported teaches nothing."""
    gate = Gate(SETTINGS, RATES)
    gate.observe_import(0, 1.0)
    assert gate.rates.import_byte_s == 1e-9
    for _ in range(100):
        gate.observe_import(1000, 4e-6)
    assert gate.rates.import_byte_s == pytest.approx(4e-9, rel=0.01)


def test_nothing_computed_teaches_nothing() -> None:
    """A step without prefill says nothing about prefill."""
    gate = Gate(SETTINGS, RATES)
    gate.observe_prefill(0, 1.0)
    assert gate.rates == RATES


def test_hope_is_what_the_store_could_do_at_its_best() -> None:
    """A store that became slow is worth measuring; one that never was fast enough is not."""
    gate = Gate(SETTINGS, RATES)
    small = Ask(num_blocks=1, block_bytes=2**20, block_tokens=1)
    assert gate.hopes(ASK)
    assert not gate.hopes(small)
    for _ in range(10):
        gate.observe_ping(0.5)
    assert not gate.judge(ASK).fetch
    assert gate.hopes(ASK)


@pytest.mark.parametrize("wrong", [{"patience_s": 0.0}, {"safety": 0.5}])
def test_a_gate_that_cannot_decide_is_refused(wrong: dict[str, float]) -> None:
    """Without patience nothing could be fetched; a factor below 1 would prefer the slower way."""
    with pytest.raises(ValueError, match="gate"):
        GateSettings(**wrong)
