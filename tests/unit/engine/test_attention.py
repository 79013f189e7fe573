"""The choice between the two attentions follows the clock, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.engine.attention import prefers_flash_attention
from antiphon.engine.llamacontext import free_model, load_model

pytestmark = pytest.mark.model


class Stopwatch:
    """A clock by which steps take what a test says, in the order they are timed: flash, plain, flash …"""

    def __init__(self, flash_s: float, plain_s: float) -> None:
        self._now_s = 0.0
        self._steps = self._readings(flash_s, plain_s)

    def now(self) -> float:
        self._now_s += next(self._steps)
        return self._now_s

    @staticmethod
    def _readings(flash_s: float, plain_s: float) -> Iterator[float]:
        while True:
            for step_s in (flash_s, flash_s, plain_s, plain_s):  # a decode and a chunk of each
                yield 0.0
                yield step_s


@pytest.fixture(scope="module")
def model(model_path: Path) -> Iterator[int]:
    loaded = load_model(model_path)
    yield loaded
    free_model(loaded)


@pytest.mark.parametrize(
    ("flash_s", "plain_s", "expected"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, True)]
)
def test_the_faster_one_is_taken(model: int, flash_s: float, plain_s: float, expected: bool) -> None:
    """Whichever steps took less; flash attention when they are even, because it needs less memory."""
    assert prefers_flash_attention(model, (1,), Stopwatch(flash_s, plain_s)) is expected
