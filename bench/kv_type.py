"""`bench kv-type`: what a KV format saves in bytes, and what it costs in speed and in quality.

The weights are those a worker here would serve. Bytes of a block are those of our own runner; everything
else is measured on its contexts (`LlamaContext`), one a format over the same loaded model, because
the runner chooses flash attention itself: quantised V needs it, so f16 is measured with and without.
What is called f16 below is the one of the two that decodes faster here, and so what a runner should choose.

Quality: a text of about 1,500 tokens is put in as it is, with the logits of every position; continuations
are greedy, from ten beginnings of that text of growing length.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path

from antiphon.cli.models import find_model
from antiphon.core.clock import WallClock
from antiphon.engine.kvtype import KvType
from antiphon.engine.llama import LlamaRunner, LlamaSettings
from antiphon.engine.llamacontext import free_model, load_model
from antiphon.engine.runner import Logits
from antiphon.kv.codec import OVERHEAD_BYTES
from antiphon.obs.log import configure_logging
from antiphon.tokens.gguf import GgufTokenizer
from antiphon.tokens.modelfile import locate
from antiphon.worker.closeness import Closeness, compare
from antiphon.worker.weightcache import cache_folder
from antiphon.worker.weights import TuningSetup, Weights, choose_weights
from bench.errors import BenchFault
from bench.load import median
from bench.machine import describe
from bench.pairs import progress
from bench.report import Figure, Run, Value, figure, rounded, today
from bench.type_sides import BLOCK_TOKENS, NUM_STREAMS, STEP_TOKENS, VARIANTS, Side, Variant, num_threads

_PREFILL_TOKENS = 128  # of a prompt, in one step
_BATCH = 8  # sequences of a decode step, beside those of one


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the bench."""

    text_tokens: int = 1536
    held_tokens: int = 1024  # of each sequence, where steps are timed
    num_rounds: int = 7
    num_steps: int = 4  # a round
    answer_tokens: int = 48

    @classmethod
    def quick(cls) -> Settings:
        return cls(text_tokens=640, held_tokens=512, num_rounds=3, answer_tokens=16)


@dataclass(slots=True)
class Speed:
    """Times of one step each, by round."""

    prefill_s: list[float] = field(default_factory=list)
    lone_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found of a variant, against the base."""

    closeness: Closeness
    same_choice: float  # share of the text's positions with the base's likeliest token
    same_answer: float  # share of greedy tokens before the first that differs from the base's
    speed: Speed


@dataclass(frozen=True, slots=True)
class Block:
    """What our runner says of a format."""

    payload_bytes: int
    num_tokens: int

    @property
    def stored_bytes(self) -> int:
        return self.payload_bytes + OVERHEAD_BYTES


def run(settings: Settings, *, is_quick: bool) -> Run:
    """Measure all formats. Raises BenchFault."""
    weights = served_weights()
    ids = text_ids(weights.path, settings.text_tokens)
    blocks = {kv_type: _block(weights.path, kv_type) for kv_type in KvType}
    model = load_model(weights.path)
    sides = {variant: Side(model, variant, settings.text_tokens) for variant in VARIANTS}
    try:
        logits = _read(sides, ids)
        speeds = _measure_speed(sides, ids, settings)
        answers = _continue(sides, ids, settings.answer_tokens)
    finally:
        for side in sides.values():
            side.close()
        free_model(model)
    base = faster_f16(speeds)
    choices = logits[base].argmax(axis=1)
    outcomes = {
        variant: Outcome(
            compare(logits[variant], logits[base], ids),
            float((logits[variant].argmax(axis=1) == choices).mean()),
            agreement(answers[variant], answers[base]),
            speeds[variant],
        )
        for variant in VARIANTS
    }
    return Run(
        bench="kv-type",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=asdict(settings) | {"weights": weights.format, "f16 is": str(base)},
        figures=figures(outcomes, blocks, base),
        raw={str(variant): _row(outcomes[variant], blocks[variant.kv_type]) for variant in VARIANTS},
    )


def faster_f16(speeds: Mapping[Variant, Speed]) -> Variant:
    """The peer: f16 with or without flash attention, whichever decodes a batch faster here."""
    f16 = [variant for variant in speeds if variant.kv_type is KvType.F16]
    return min(f16, key=lambda variant: median(speeds[variant].batch_s))


def served_weights() -> Weights:
    """What a worker of the built-in model would serve here; tuned now if it never was."""
    source = locate(find_model("smollm2", None, None))
    assert source is not None, "the built-in model has a file"
    setup = TuningSetup(
        folder=cache_folder(os.environ),
        threads=num_threads(),
        progress=lambda text, _: progress(text),
        log=configure_logging(level="warning"),
    )
    return choose_weights(source, "auto", setup)


def text_ids(path: Path, num_tokens: int) -> list[int]:
    """The text on which the product judges weights, and how it goes on. Raises BenchFault if it is short."""
    begin = resources.files("antiphon.worker").joinpath("perplexity.txt").read_text("utf-8")
    vocabulary = GgufTokenizer(path)
    try:
        ids = vocabulary.encode(f"{begin}\n{(Path(__file__).parent / 'story.txt').read_text('utf-8')}")
    finally:
        vocabulary.close()
    if len(ids) < num_tokens:
        raise BenchFault(f"the text has {len(ids)} tokens, not {num_tokens}")
    return ids[:num_tokens]


def beginnings(num_tokens: int) -> list[int]:
    """Lengths of the prompts: whole blocks, evenly up to the whole text."""
    num_blocks = num_tokens // BLOCK_TOKENS
    return [BLOCK_TOKENS * (num_blocks * (i + 1) // NUM_STREAMS) for i in range(NUM_STREAMS)]


def agreement(answers: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> float:
    """Share of the base's tokens that stand before the first one that differs."""
    num_same = 0
    for ours, theirs in zip(answers, base, strict=True):
        differs = [a != b for a, b in zip(ours, theirs, strict=True)]
        num_same += differs.index(True) if True in differs else len(differs)
    return num_same / sum(map(len, base))


def _block(path: Path, kv_type: KvType) -> Block:
    runner = LlamaRunner(
        LlamaSettings(
            path=path,
            context_tokens=512,
            max_sequences=2,
            max_step_tokens=STEP_TOKENS,
            thread_counts=(num_threads(),),
            kv_type=kv_type,
        ),
        WallClock(),
    )
    try:
        if not runner.shares_blocks:
            raise BenchFault(f"blocks of {kv_type.value} are not copied exactly")
        return Block(runner.block_bytes, runner.block_tokens)
    finally:
        runner.close_model()


def _read(sides: Mapping[Variant, Side], ids: list[int]) -> dict[Variant, Logits]:
    logits = {}
    for variant, side in sides.items():
        progress(f"{variant}: the text")
        logits[variant] = side.read(ids)
    return logits


def _measure_speed(sides: Mapping[Variant, Side], ids: list[int], settings: Settings) -> dict[Variant, Speed]:
    speeds = {variant: Speed() for variant in sides}
    for side in sides.values():
        side.hold([settings.held_tokens] * _BATCH)
    for number in range(settings.num_rounds):
        progress(f"round {number + 1} of {settings.num_rounds}")
        for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
            side, speed = sides[variant], speeds[variant]
            speed.prefill_s.append(side.prefill_s(ids[:_PREFILL_TOKENS]))
            speed.lone_s.append(side.decode_s(1, 2 * settings.num_steps))
            speed.batch_s.append(side.decode_s(_BATCH, settings.num_steps))
    return speeds


def _continue(
    sides: Mapping[Variant, Side], ids: list[int], num_tokens: int
) -> dict[Variant, list[list[int]]]:
    prompts = beginnings(len(ids))
    answers = {}
    for variant, side in sides.items():
        progress(f"{variant}: greedy continuations")
        answers[variant] = side.answers(ids, prompts, num_tokens)
    return answers


def figures(
    outcomes: Mapping[Variant, Outcome], blocks: Mapping[KvType, Block], base: Variant
) -> list[Figure]:
    """Each quantised format against f16, and f16's other attention, to see what is mere rounding."""
    f16 = blocks[KvType.F16].stored_bytes
    q8_0, q4_0, other = (
        Variant(KvType.Q8_0, flash=True),
        Variant(KvType.Q4_0, flash=True),
        Variant(KvType.F16, flash=not base.flash),
    )
    q8_0_bytes, q4_0_bytes = (blocks[v.kv_type].stored_bytes / f16 for v in (q8_0, q4_0))
    return [
        figure("q8_0_bytes", q8_0_bytes, "q8_0: bytes of a stored block ÷ f16's", "<= 0.55"),
        *_qualities("q8_0", outcomes[q8_0], ("<= 1.005", "<= 0.01")),
        *_speeds("q8_0", outcomes[q8_0].speed, outcomes[base].speed, f"{q8_0} ÷ {base}"),
        figure("q4_0_bytes", q4_0_bytes, "q4_0: bytes of a stored block ÷ f16's", "<= 0.3"),
        *_qualities("q4_0", outcomes[q4_0]),
        *_speeds("q4_0", outcomes[q4_0].speed, outcomes[base].speed, f"{q4_0} ÷ {base}"),
        *_qualities("f16_other", outcomes[other]),
        *_speeds("f16_other", outcomes[other].speed, outcomes[base].speed, f"{other} ÷ {base}"),
    ]


def _qualities(name: str, ours: Outcome, goals: tuple[str | None, str | None] = (None, None)) -> list[Figure]:
    """`goals`: of perplexity and divergence."""
    what = "f16 with its other attention" if name == "f16_other" else name
    perplexity = 1 + ours.closeness.perplexity_change
    return [
        figure(f"{name}_perplexity", perplexity, f"{what}: perplexity ÷ f16's", goals[0]),
        figure(
            f"{name}_divergence",
            ours.closeness.divergence,
            f"{what}: mean KL divergence of the next token from f16's, nats",
            goals[1],
        ),
        figure(
            f"{name}_same_choice", ours.same_choice, f"{what}: share of positions with f16's likeliest token"
        ),
        figure(
            f"{name}_same_answer",
            ours.same_answer,
            f"{what}: share of greedy tokens before the first that differs from f16's",
        ),
    ]


def _speeds(name: str, ours: Speed, peer: Speed, what: str) -> list[Figure]:
    return [
        figure(f"{name}_prefill", _ratio(ours.prefill_s, peer.prefill_s), f"time of a prefill step, {what}"),
        figure(f"{name}_decode_1", _ratio(ours.lone_s, peer.lone_s), f"time of a decode step of 1, {what}"),
        figure(
            f"{name}_decode_{_BATCH}",
            _ratio(ours.batch_s, peer.batch_s),
            f"time of a decode step of {_BATCH}, {what}",
        ),
    ]


def _ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    return median([a / b for a, b in zip(ours, peer, strict=True)])


def _row(outcome: Outcome, block: Block) -> dict[str, Value]:
    close, speed = outcome.closeness, outcome.speed
    return {
        "bytes a token": block.payload_bytes // block.num_tokens,
        "tokens a block": block.num_tokens,
        "bytes of a stored block": block.stored_bytes,
        "perplexity": rounded(close.perplexity, 5),
        "its change": rounded(close.perplexity_change),
        "standard error": rounded(close.perplexity_error),
        "KL divergence, nats": rounded(close.divergence),
        "same likeliest token": rounded(outcome.same_choice),
        "same greedy tokens": rounded(outcome.same_answer),
        f"prefill step of {_PREFILL_TOKENS}, ms": rounded(1e3 * median(speed.prefill_s)),
        "decode step of 1, ms": rounded(1e3 * median(speed.lone_s)),
        f"decode step of {_BATCH}, ms": rounded(1e3 * median(speed.batch_s)),
    }
