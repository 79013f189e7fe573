"""bench/kv_type.py: its text and prompts, what it compares, the figures it makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.errors import BenchFault
from bench.kv_type import (
    Block,
    Outcome,
    Settings,
    Speed,
    agreement,
    beginnings,
    faster_f16,
    figures,
    text_ids,
)
from bench.type_sides import BLOCK_TOKENS, NUM_STREAMS, STEP_TOKENS, VARIANTS, Side, Variant

from antiphon.engine.kvtype import KvType
from antiphon.engine.llamacontext import free_model, load_model
from antiphon.worker.closeness import Closeness

BLOCKS = {
    KvType.F16: Block(1_000 - 144, 32),
    KvType.Q8_0: Block(530 - 144, 32),
    KvType.Q4_0: Block(280 - 144, 32),
}


def speed(seconds: float) -> Speed:
    """All its times the same."""
    return Speed([seconds] * 3, [seconds] * 3, [seconds] * 3)


def outcome(change: float, seconds: float) -> Outcome:
    """A variant that changed the perplexity so."""
    closeness = Closeness(
        perplexity=20 * (1 + change),
        perplexity_change=change,
        perplexity_error=0.001,
        divergence=change,
        mean_logit_change=0.0,
        max_logit_change=0.0,
    )
    return Outcome(closeness, 0.9, 0.8, speed(seconds))


@pytest.fixture(scope="module")
def model(model_path: Path) -> Iterator[int]:
    """The built-in model, loaded."""
    loaded = load_model(model_path)
    yield loaded
    free_model(loaded)


@pytest.mark.parametrize("settings", [Settings(), Settings.quick()])
def test_prompts_are_beginnings_of_whole_blocks(settings: Settings) -> None:
    """Ten of them, ever longer, up to the whole text; what is held where steps are timed fits too."""
    lengths = beginnings(settings.text_tokens)
    assert len(set(lengths)) == len(lengths) == NUM_STREAMS
    assert lengths == sorted(lengths)
    assert lengths[-1] == settings.text_tokens
    assert all(length % BLOCK_TOKENS == 0 for length in lengths)
    assert settings.answer_tokens < STEP_TOKENS
    assert settings.held_tokens <= settings.text_tokens


@pytest.mark.parametrize(
    ("answers", "share"),
    [
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 1.0),
        ([[1, 2, 3, 4], [5, 6, 7, 9]], 0.875),
        ([[1, 9, 3, 4], [5, 6, 7, 8]], 0.625),
        ([[9, 2, 3, 4], [9, 6, 7, 8]], 0.0),
    ],
)
def test_agreement_ends_at_the_first_difference(answers: list[list[int]], share: float) -> None:
    """What is equal again behind it is chance, and does not count."""
    assert agreement(answers, [[1, 2, 3, 4], [5, 6, 7, 8]]) == share


@pytest.mark.parametrize("base_is_flash", [False, True])
def test_the_peer_is_f16_in_its_faster_mode(base_is_flash: bool) -> None:
    """However fast a quantised format may be."""
    speeds = {
        Variant(KvType.F16, flash=base_is_flash): speed(1.0),
        Variant(KvType.F16, flash=not base_is_flash): speed(2.0),
        Variant(KvType.Q8_0, flash=True): speed(0.5),
    }
    assert faster_f16(speeds) == Variant(KvType.F16, flash=base_is_flash)


@pytest.mark.parametrize("base_is_flash", [False, True])
def test_figures_are_against_f16(base_is_flash: bool) -> None:
    """Whichever attention that is, the other one of f16 stands beside it."""
    base, other = (Variant(KvType.F16, flash=flash) for flash in (base_is_flash, not base_is_flash))
    outcomes = {
        base: outcome(0.0, 1.0),
        other: outcome(0.001, 1.5),
        Variant(KvType.Q8_0, flash=True): outcome(0.004, 2.0),
        Variant(KvType.Q4_0, flash=True): outcome(0.02, 3.0),
    }
    assert set(outcomes) == set(VARIANTS)
    found = {f.name: f for f in figures(outcomes, BLOCKS, base)}
    assert found["q8_0_bytes"].value == 0.53
    assert found["q4_0_bytes"].value == 0.28
    assert [found[f"{name}_perplexity"].value for name in ("q8_0", "q4_0", "f16_other")] == [
        1.004,
        1.02,
        1.001,
    ]
    assert [found[f"{name}_prefill"].value for name in ("q8_0", "q4_0", "f16_other")] == [2.0, 3.0, 1.5]
    assert str(other) in found["f16_other_decode_1"].meaning
    assert not any(f.is_missed for f in found.values())


@pytest.mark.model
def test_the_text_is_long_enough(model_path: Path) -> None:
    """For a full run; one token too many is a fault, not a shorter text."""
    num_tokens = Settings().text_tokens
    assert len(text_ids(model_path, num_tokens)) == num_tokens
    with pytest.raises(BenchFault, match="tokens, not 100000"):
        text_ids(model_path, 100_000)


@pytest.mark.model
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_copies_go_on_as_the_text_would(model: int, model_path: Path, variant: Variant) -> None:
    """The first token after a copied beginning is the likeliest one where the text was read, or a tie."""
    ids = text_ids(model_path, NUM_STREAMS * BLOCK_TOKENS)
    side = Side(model, variant, len(ids))
    try:
        logits = side.read(ids)
        assert logits.shape[0] == len(ids)
        prompts = beginnings(len(ids))
        answers = side.answers(ids, prompts, 2)
        for length, answer in zip(prompts, answers, strict=True):
            assert len(answer) == 2
            row = logits[length - 1]
            assert row[answer[0]] >= row.max() - 1.0
        side.hold([len(ids)] * NUM_STREAMS)
        assert side.prefill_s(ids[:STEP_TOKENS]) > 0
        assert side.decode_s(NUM_STREAMS, 2) > 0
    finally:
        side.close()
