"""The draw by weights: its distribution, and that little moves it little."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.engine.race import race

NUM = 20_000


def wins(weights: list[float], ids: list[int] | None = None) -> np.ndarray:
    """How often each index wins, over many keys."""
    row = np.array(weights, np.float32)
    named = None if ids is None else np.array(ids, np.intp)
    return np.bincount([race(row, named, key * 2654435761) for key in range(NUM)], minlength=row.size) / NUM


def test_each_wins_with_its_share() -> None:
    """Within what so many draws can tell."""
    weights = [1.0, 0.5, 0.25, 0.05, 0.2]
    assert np.abs(wins(weights) - np.array(weights) / 2.0).max() < 4 * (0.25 / NUM) ** 0.5


def test_a_pack_of_weak_ones_wins_with_theirs() -> None:
    """Together as often as their weights say, and one of them as often as another."""
    weights = [1.0] + [0.0008] * 500
    shares = wins(weights)
    assert abs(shares[0] - 1 / 1.4) < 4 * (0.25 / NUM) ** 0.5
    assert shares[1:].max() < 5 * shares[1:].mean()


def test_weight_zero_never_wins() -> None:
    """Neither among strong ones nor where a pack might run."""
    assert wins([0.0, 1.0, 0.0])[1] == 1.0
    assert wins([0.0, 1e-4, 1.0, 0.0])[[0, 3]].sum() == 0.0


def test_the_draw_is_the_ids_and_not_the_places() -> None:
    """A filter that leaves the winner in changes nothing for it."""
    weights = np.array([1.0, 0.9, 0.8, 0.7], np.float32)
    for key in range(300):
        winner = race(weights, None, key)
        kept = np.array([i for i in range(4) if i == winner or i % 2], np.intp)
        assert kept[race(weights[kept], kept, key)] == winner


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_logits_that_moved_a_little_seldom_change_the_winner(spread: float) -> None:
    """As often as the distributions differ, times two and a chance; an inverse would change most draws."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, spread, 5000)
    moved = logits + rng.normal(0, 0.02, logits.size)
    one, other = (np.exp(x - x.max()).astype(np.float32) for x in (logits, moved))
    distance = np.abs(one / one.sum() - other / other.sum()).sum() / 2
    num = 4000
    changed = sum(race(one, None, key * 7919) != race(other, None, key * 7919) for key in range(num)) / num
    assert changed < 2 * distance + 4 * (distance / num) ** 0.5
