"""How long a scripted step takes, and how large its KV is."""

from __future__ import annotations

import pytest

from antiphon.engine.runner import Chunk
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings, StepTimes

TIMES = StepTimes(step_s=1.0, prefill_token_s=0.25, decode_row_s=0.125)


@pytest.mark.parametrize(
    ("lengths", "seconds"),
    [([], 1.0), ([1], 1.125), ([8], 3.0), ([8, 1, 1, 4], 4.25)],
)
def test_a_step_takes_as_long_as_what_is_in_it(lengths: list[int], seconds: float) -> None:
    """Its own part, each prompt token, each answer."""
    chunks = [Chunk(number, 0, [7] * length, True) for number, length in enumerate(lengths)]
    assert TIMES(chunks) == seconds


def test_the_runner_waits_that_long_and_says_how_fast_prompts_are() -> None:
    """So that a router need not wait for the first prompt to learn it."""
    waited: list[float] = []
    settings = ScriptedSettings(step_s=TIMES, prefill_tokens_per_s=TIMES.prefill_tokens_per_s)
    runner = ScriptedRunner(SCRIPTS["babble"], settings, waited.append)
    runner.open(0, [])
    runner.run([Chunk(0, 0, [1, 2, 3], True)])
    assert waited == [1.75]
    assert runner.start_prefill_tokens_per_s == 4.0
    assert StepTimes(step_s=1.0).prefill_tokens_per_s == 0.0


def test_padded_kv_is_larger_and_no_less_exact() -> None:
    """A block of a realistic size goes out and in; it is another layout, so the two never mix."""
    small, large, other = (
        ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(kv_token_bytes=size)) for size in (16, 1000, 1000)
    )
    assert small.kv_description != large.kv_description == other.kv_description
    large.open(0, [])
    large.run([Chunk(0, 0, list(range(17)), False)])
    large.keep(0, 0, 5)
    (payload,) = large.export_blocks([5])
    assert len(payload) == large.block_bytes == 16 * 1000
    with pytest.raises(ValueError, match="no block"):
        small.import_block(1, payload)
    other.import_block(1, payload)
    for runner, blocks in ((other, [1]), (large, [5])):
        runner.open(9, blocks)
    chunk = [Chunk(9, 16, [3], True)]
    assert other.run(chunk).tolist() == large.run(chunk).tolist()
