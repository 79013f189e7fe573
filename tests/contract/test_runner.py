"""What every `ModelRunner` promises, over the scripted one and over llama.cpp with the built-in model.

Where both compute the same tokens in the same step shapes the logits must be equal to the last bit;
where the shapes differ (a prefix taken over instead of computed) arithmetic may differ in the last
places, so those are compared within a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from antiphon.core.clock import WallClock
from antiphon.engine import llama
from antiphon.engine.kvtype import KvType
from antiphon.engine.llama import LlamaRunner, LlamaSettings
from antiphon.engine.runner import Chunk, Logits, ModelRunner
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings

MakeRunner = Callable[[], ModelRunner]
LOGIT_BOUND = 1.0  # of logits that spread over about 30; wrong KV moves them by 3 and more


@pytest.fixture(
    scope="module",
    params=[
        "scripted",
        pytest.param("llama, flash attention", marks=pytest.mark.model),
        pytest.param("llama, plain attention", marks=pytest.mark.model),
    ],
)
def make_runner(request: pytest.FixtureRequest) -> Iterator[MakeRunner]:
    """A factory of fresh runners: 4 sequences of 256 tokens."""
    made: list[ModelRunner] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(llama, "prefers_flash_attention", lambda *_: "flash" in request.param)

    def make() -> ModelRunner:
        if request.param == "scripted":
            size = ScriptedSettings(context_tokens=256, max_sequences=4, block_tokens=32)
            made.append(ScriptedRunner(SCRIPTS["noise"], size))
        else:
            path: Path = request.getfixturevalue("model_path")
            made.append(
                LlamaRunner(
                    LlamaSettings(
                        path=path,
                        context_tokens=256,
                        max_sequences=4,
                        max_step_tokens=256,
                        thread_counts=(1,),
                    ),
                    WallClock(),
                )
            )
        return made[-1]

    yield make
    patch.undo()
    for runner in made:
        if isinstance(runner, LlamaRunner):
            runner.close_model()


@pytest.fixture(scope="module")
def runner(make_runner: MakeRunner) -> ModelRunner:
    """One runner for the whole module; tests close what they open and drop what they keep."""
    return make_runner()


def prompt(seed: int, length: int) -> list[int]:
    """Ordinary token ids, the same for the same seed."""
    return (np.random.default_rng(seed).integers(32, 127, length)).tolist()


def logits_of(runner: ModelRunner, sequence: int, tokens: list[int], start: int = 0) -> Logits:
    return runner.run([Chunk(sequence, start, tokens[start:], True)])[0].copy()


def assert_near(found: Logits, expected: Logits) -> None:
    assert found[expected.argmax()] > found.max() - LOGIT_BOUND
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(found), finite)
    assert np.abs(found[finite] - expected[finite]).max() < LOGIT_BOUND


def keep_all(runner: ModelRunner, sequence: int, count: int, first: int) -> list[int]:
    blocks = list(range(first, first + count))
    for index, block in enumerate(blocks):
        runner.keep(sequence, index, block)
    return blocks


def test_chunks_give_what_the_whole_gives(runner: ModelRunner) -> None:
    """A prompt in three steps leads to the same token as in one."""
    tokens = prompt(1, 100)
    runner.open(1, [])
    whole = logits_of(runner, 1, tokens)
    runner.close(1)
    runner.open(2, [])
    for start, end in ((0, 33), (33, 80)):
        assert len(runner.run([Chunk(2, start, tokens[start:end], False)])) == 0
    assert_near(logits_of(runner, 2, tokens, 80), whole)
    runner.close(2)


def test_rows_come_in_the_order_of_the_chunks(runner: ModelRunner) -> None:
    """Whatever order sequences were opened in, row i belongs to the i-th chunk that wants logits."""
    prompts = {s: prompt(10 + s, 20 + s) for s in range(4)}
    alone: dict[int, Logits] = {}
    for sequence, tokens in prompts.items():
        runner.open(sequence, [])
        alone[sequence] = logits_of(runner, sequence, tokens)
        runner.close(sequence)
    for sequence in prompts:
        runner.open(sequence, [])
    order = [2, 0, 3, 1]
    rows = runner.run([Chunk(s, 0, prompts[s], s != 3) for s in order])
    for row, sequence in zip(rows, (2, 0, 1), strict=True):
        assert_near(row, alone[sequence])
    for sequence in prompts:
        runner.close(sequence)


def test_kept_blocks_replace_their_computation(runner: ModelRunner) -> None:
    """From a live sequence, from one that has ended, and twice at once."""
    tokens = prompt(2, 100)
    runner.open(1, [])
    whole = logits_of(runner, 1, tokens)
    blocks = keep_all(runner, 1, 3, first=100)
    runner.open(2, blocks)
    assert_near(logits_of(runner, 2, tokens, 96), whole)
    runner.close(1)
    runner.open(3, blocks[:2])
    assert_near(logits_of(runner, 3, tokens, 64), whole)
    runner.close(2)
    runner.close(3)
    runner.open(4, blocks)
    assert_near(logits_of(runner, 4, tokens, 96), whole)
    runner.close(4)
    for block in blocks:
        runner.drop(block)


def test_blocks_outlive_the_reuse_of_their_place(runner: ModelRunner) -> None:
    """More sequences pass through than there are places; the kept blocks are still right."""
    tokens = prompt(3, 80)
    runner.open(1, [])
    whole = logits_of(runner, 1, tokens)
    blocks = keep_all(runner, 1, 2, first=200)
    runner.close(1)
    for round_number in range(2):
        for sequence in range(10, 14):
            runner.open(sequence, [])
            runner.run([Chunk(sequence, 0, prompt(40 + sequence + round_number, 50), False)])
        for sequence in range(10, 14):
            runner.close(sequence)
    runner.open(2, blocks)
    assert_near(logits_of(runner, 2, tokens, 64), whole)
    runner.close(2)
    for block in blocks:
        runner.drop(block)


def test_a_dropped_number_may_come_back_with_other_content(runner: ModelRunner) -> None:
    """Nothing of the old content is found under it."""
    for seed in (4, 5):
        tokens = prompt(seed, 70)
        runner.open(1, [])
        whole = logits_of(runner, 1, tokens)
        blocks = keep_all(runner, 1, 2, first=300)
        runner.close(1)
        runner.open(2, blocks)
        assert_near(logits_of(runner, 2, tokens, 64), whole)
        runner.close(2)
        for block in blocks:
            runner.drop(block)


def test_exported_blocks_are_exact_in_another_runner(make_runner: MakeRunner, runner: ModelRunner) -> None:
    """Bytes out, bytes in, in a runner that never saw the tokens: equal to the last bit."""
    tokens = prompt(6, 65)
    runner.open(1, [])
    runner.run([Chunk(1, 0, tokens[:64], False)])
    blocks = keep_all(runner, 1, 2, first=400)
    expected = logits_of(runner, 1, tokens, 64)
    payloads = runner.export_blocks(blocks)
    other = make_runner()
    for block, payload in zip((7, 8), payloads, strict=True):
        other.import_block(block, payload)
    other.open(1, [7, 8])
    assert np.array_equal(logits_of(other, 1, tokens, 64), expected)
    assert other.export_blocks([7, 8]) == payloads
    runner.close(1)
    for block in blocks:
        runner.drop(block)


def test_blocks_of_several_sequences_are_exported_at_once(runner: ModelRunner) -> None:
    """In the order asked for, from open and ended sequences alike, as one by one."""
    blocks: list[int] = []
    for sequence in (1, 2):
        runner.open(sequence, [])
        runner.run([Chunk(sequence, 0, prompt(60 + sequence, 70), False)])
        blocks += keep_all(runner, sequence, 2, first=500 + 10 * sequence)
    runner.close(1)
    mixed = [blocks[3], blocks[0], blocks[2], blocks[1]]
    payloads = runner.export_blocks(mixed)
    assert payloads == [runner.export_blocks([block])[0] for block in mixed]
    assert len(set(payloads)) == 4
    assert {type(payload) for payload in payloads} == {bytes}
    runner.close(2)
    for block in blocks:
        runner.drop(block)


def test_only_copies_cost_time(make_runner: MakeRunner, runner: ModelRunner) -> None:
    """What lies in place costs nothing to begin with; so does nothing at all. Start speeds are real."""
    runner.open(1, [])
    logits_of(runner, 1, prompt(7, 70))
    blocks = keep_all(runner, 1, 2, first=500)
    payloads = runner.export_blocks(blocks)
    other = make_runner()
    assert other.open(1, []) == 0.0
    other.close(1)
    for block, payload in zip(blocks, payloads, strict=True):
        other.import_block(block, payload)
    copying_s = other.open(2, blocks)
    other.close(2)
    assert other.open(3, blocks) == 0.0
    is_real = isinstance(other, LlamaRunner)
    assert (copying_s > 0.0, other.start_prefill_tokens_per_s > 0.0) == (is_real, is_real)
    runner.close(1)
    for block in blocks:
        runner.drop(block)


def test_what_is_not_a_block_is_refused(runner: ModelRunner) -> None:
    """By its length, before a byte of it is taken; the runner goes on."""
    runner.open(1, [])
    runner.run([Chunk(1, 0, prompt(9, 32), False)])
    (block,) = keep_all(runner, 1, 1, first=600)
    (payload,) = runner.export_blocks([block])
    for wrong in (b"", payload[:-1], payload + b"x", payload + payload):
        with pytest.raises(ValueError, match="bytes"):
            runner.import_block(601, wrong)
    runner.import_block(601, memoryview(payload))
    assert runner.export_blocks([601]) == [payload]
    runner.close(1)
    for number in (block, 601):
        runner.drop(number)


def test_memory_of_a_payload_may_be_used_again(runner: ModelRunner) -> None:
    """A view of memory that changes later does not change the block."""
    runner.open(1, [])
    runner.run([Chunk(1, 0, prompt(9, 32), False)])
    (block,) = keep_all(runner, 1, 1, first=700)
    (payload,) = runner.export_blocks([block])
    memory = bytearray(payload)
    runner.import_block(701, memoryview(memory).toreadonly())
    memory[:] = bytes(len(memory))
    assert runner.export_blocks([701]) == [payload]
    runner.close(1)
    for number in (block, 701):
        runner.drop(number)


def test_an_answer_is_undisturbed_by_neighbours_with_gaps(runner: ModelRunner) -> None:
    """Steps in which some open sequences take no part leave those as they were."""
    tokens = prompt(7, 40)
    runner.open(0, [])
    expected = [logits_of(runner, 0, tokens[:n], 0 if n == 30 else n - 1) for n in range(30, 41)]
    runner.close(0)
    for sequence in range(4):
        runner.open(sequence, [])
        runner.run([Chunk(sequence, 0, tokens[:29], False)])
    for n in range(30, 41):
        rows = runner.run([Chunk(s, n - 1, tokens[n - 1 : n], True) for s in (0, 3)])
        assert_near(rows[0], expected[n - 30])
        assert_near(rows[1], expected[n - 30])
    late = runner.run([Chunk(1, 29, tokens[29:], True)])
    assert_near(late[0], expected[-1])
    for sequence in range(4):
        runner.close(sequence)


def test_closing_what_is_not_open_is_fine(runner: ModelRunner) -> None:
    """After a failed step the engine closes whatever it planned to open."""
    runner.close(999)
    runner.drop(999)
    assert runner.shares_blocks


@pytest.mark.model
@pytest.mark.parametrize("kv_type", KvType)
def test_a_join_is_exact_in_every_format(model_path: Path, kv_type: KvType) -> None:
    """Blocks that were computed, sent and joined give the very logits of those that never moved.

    In another runner, beside other sequences, at a length that is no multiple of a step.
    """
    tokens = prompt(11, 7 * 32 + 9)
    source, target = (llama_runner(model_path, kv_type, max_sequences=2 + i) for i in range(2))
    source.open(1, [])
    for start in range(0, 7 * 32, 100):
        end = min(start + 100, 7 * 32)
        source.run([Chunk(1, start, tokens[start:end], False)])
    payloads = source.export_blocks(keep_all(source, 1, 7, first=0))
    target.open(5, [])
    target.run([Chunk(5, 0, prompt(12, 50), False)])
    for block, payload in enumerate(payloads):
        target.import_block(block, payload)
    target.open(6, list(range(7)))
    for end in range(7 * 32 + 1, len(tokens) + 1):
        expected = logits_of(source, 1, tokens[:end], end - 1)
        assert np.array_equal(logits_of(target, 6, tokens[:end], end - 1), expected)
    for runner in (source, target):
        runner.close_model()


@pytest.mark.model
def test_formats_differ_in_bytes_and_namespace_but_not_in_block_size(model_path: Path) -> None:
    """What a worker is set to changes how many bytes a block has, never which tokens it holds."""
    found = {}
    for kv_type in KvType:
        runner = llama_runner(model_path, kv_type)
        assert runner.shares_blocks
        found[kv_type] = (runner.block_tokens, runner.block_bytes, runner.kv_description)
        runner.close_model()
    assert [found[t][0] for t in KvType] == [32, 32, 32]
    assert [found[t][1] // 32 for t in KvType] == [23_040, 12_240, 6_480]
    assert len({found[t][2] for t in KvType}) == 3
    description = found[KvType.Q8_0][2]
    assert (description.architecture, description.rope_dimensions) == ("llama", 64)
    assert (description.k_type, description.kv_rotated) == ("q8_0", True)
    assert not found[KvType.F16][2].kv_rotated


def llama_runner(path: Path, kv_type: KvType, max_sequences: int = 2) -> LlamaRunner:
    settings = LlamaSettings(
        path=path,
        context_tokens=512,
        max_sequences=max_sequences,
        max_step_tokens=128,
        thread_counts=(1,),
        kv_type=kv_type,
    )
    return LlamaRunner(settings, WallClock())


@pytest.mark.model
def test_blocks_of_flash_attention_serve_plain_attention(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payload is the same block in either mode: what one computed the other goes on from."""
    runners = {}
    for flash in (True, False):
        monkeypatch.setattr(llama, "prefers_flash_attention", lambda *_, flash=flash: flash)
        runners[flash] = LlamaRunner(
            LlamaSettings(
                path=model_path, context_tokens=256, max_sequences=2, max_step_tokens=128, thread_counts=(1,)
            ),
            WallClock(),
        )
    tokens = prompt(8, 65)
    fused, plain = runners[True], runners[False]
    fused.open(1, [])
    fused.run([Chunk(1, 0, tokens[:64], False)])
    for index, payload in enumerate(fused.export_blocks(keep_all(fused, 1, 2, first=0))):
        plain.import_block(index, payload)
    plain.open(1, [0, 1])
    assert_near(logits_of(plain, 1, tokens, 64), logits_of(fused, 1, tokens, 64))
    assert plain.export_blocks([0, 1]) == fused.export_blocks([0, 1])
    for runner in runners.values():
        runner.close_model()
