"""worker.closeness: figures of two models' logits on one text."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from antiphon.worker.closeness import Closeness, compare

NEAR = Closeness(
    perplexity=10.0,
    perplexity_change=0.004,
    perplexity_error=0.0,
    divergence=0.004,
    mean_logit_change=0.1,
    max_logit_change=1.0,
)


def logits(seed: int, num_tokens: int = 150, vocab: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (num_tokens, vocab)).astype(np.float32)


def probabilities(rows: np.ndarray) -> np.ndarray:
    weights = np.exp(rows.astype(np.float64))
    return weights / weights.sum(axis=1, keepdims=True)


def test_a_model_is_perfectly_close_to_itself() -> None:
    """Equal logits: no change, no error, no divergence."""
    found = compare(logits(1), logits(1), list(range(40)) * 3 + list(range(30)))
    assert found.perplexity_change == found.perplexity_error == found.divergence == 0.0
    assert found.mean_logit_change == found.max_logit_change == 0.0


def test_figures_are_those_of_the_definitions() -> None:
    """Perplexity, its change and error, and the divergence agree with formulas written out plainly."""
    ours, theirs = logits(1), logits(2)
    ids = np.random.default_rng(3).integers(0, 40, 150)
    p, q = probabilities(theirs)[:-1], probabilities(ours)[:-1]
    at = np.arange(149), ids[1:]
    change = np.log(p[at]) - np.log(q[at])
    found = compare(ours, theirs, ids.tolist())
    assert found.perplexity == pytest.approx(np.exp(-np.log(q[at]).mean()))
    assert found.perplexity_change == pytest.approx(found.perplexity / np.exp(-np.log(p[at]).mean()) - 1)
    assert found.perplexity_error == pytest.approx(change.std() / np.sqrt(149))
    assert found.divergence == pytest.approx((p * np.log(p / q)).sum(axis=1).mean())
    assert found.mean_logit_change == pytest.approx(np.abs(ours - theirs)[:-1].mean(), rel=1e-5)
    assert found.max_logit_change == pytest.approx(np.abs(ours - theirs)[:-1].max())


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity() -> None:
    """Equal logits for every token: perplexity is the number of tokens."""
    flat = np.zeros((10, 40), dtype=np.float32)
    assert compare(flat, flat, list(range(10))).perplexity == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("fields", "is_near"),
    [
        ({}, True),
        ({"perplexity_change": 0.006}, False),
        ({"perplexity_change": -0.006}, False),
        ({"perplexity_change": 0.009, "perplexity_error": 0.0045}, True),  # as chance may have it
        ({"perplexity_change": 0.016, "perplexity_error": 0.0045}, False),
        ({"divergence": 0.011}, False),
        ({"divergence": 0.05, "perplexity_error": 0.1}, False),  # noise excuses no divergence
    ],
)
def test_near_lossless_is_little_change_beyond_chance(fields: dict[str, float], is_near: bool) -> None:
    """Perplexity may move 0.5 % beyond twice its error, the divergence must stay within 0.01."""
    assert msgspec.structs.replace(NEAR, **fields).is_near_lossless is is_near
