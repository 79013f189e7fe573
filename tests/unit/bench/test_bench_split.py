"""`bench split`: its loads, and what it makes of the answers."""

from __future__ import annotations

import math

import msgspec
import pytest
from bench.client import Answer
from bench.split import SCENARIOS, Measured, Scenario, Settings, judge, make_load

from antiphon.core.catalogue import Catalogue

SETTINGS = Settings()
MIXED = SCENARIOS[0]


def answer(ttft_s: float, gaps_s: list[float], fault: str | None = None) -> Answer:
    """An answer that was due at 0."""
    made = Answer(0.0, ttft_s, ttft_s + sum(gaps_s), 200, num_tokens=1 + len(gaps_s), fault=fault)
    made.gaps_s = gaps_s
    return made


def length(body: bytes) -> int:
    return len(msgspec.json.decode(body)["prompt"])


def test_the_catalogue_of_the_bench_is_one() -> None:
    """Its model takes time by what is in a step, and its KV has a size."""
    entry = Catalogue.parse(SETTINGS.catalogue).find("staged")
    assert (entry.prefill_token_s, entry.kv_token_bytes) == (0.0004, 8192)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_both_sides_get_the_same_load(scenario: Scenario) -> None:
    """By the seed; twice the workers, twice the requests; lengths within the limits."""
    load = make_load(SETTINGS, scenario, 1)
    assert load == make_load(SETTINGS, scenario, 1)
    assert load != make_load(SETTINGS, scenario, 2)
    assert len(load.chats) == round(SETTINGS.load_s * SETTINGS.chats_per_s * scenario.num_workers / 2)
    assert bool(load.longs) == scenario.has_longs
    assert all(40 <= length(request.body) <= 120 for request in load.chats)
    assert all(3000 <= length(request.body) <= 5000 for request in load.longs)


def test_warm_prompts_were_said_before() -> None:
    """Every long prompt is among those that warm up, and only then."""
    scenario = next(s for s in SCENARIOS if s.is_warm)
    load = make_load(SETTINGS, scenario, 1)
    assert {r.body for r in load.longs} <= {r.body for r in load.warming}
    cold = make_load(SETTINGS, MIXED, 1)
    assert not {r.body for r in cold.longs} & {r.body for r in cold.warming}


def test_goodput_counts_what_was_in_time() -> None:
    """A late first token, slow tokens and a fault are not; each kind has its limit."""
    answers = [
        answer(0.1, [0.01] * 9),
        answer(0.9, [0.01] * 9),  # too late for a chat
        answer(0.1, [0.05] * 9),  # too slow
        answer(0.1, [0.01] * 9, fault="planted"),
        answer(4.0, [0.01] * 9),  # in time for a long prompt
    ]
    measured = judge(SETTINGS, answers, [False, False, False, False, True], 1.0)
    assert measured == Measured(
        chat_ttft_s=math.inf,
        long_ttft_s=4.0,
        gap_s=0.05,
        goodput_per_s=pytest.approx(2 / 4.09),
        num_split=1.0,
    )


def test_without_long_prompts_nothing_is_said_of_them() -> None:
    """Not zero."""
    assert math.isnan(judge(SETTINGS, [answer(0.1, [0.01])], [False], 0.0).long_ttft_s)
