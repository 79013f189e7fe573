"""A runner without a model, whose every token depends on the KV it holds.

KV of a position is the token written there plus a digest of all tokens up to it. What comes next is
a function of that memory alone, never of what the engine claims, so a wrong block, a hole or a
stale copy shows as other text. For trying the API without weights, for tests and for the simulator.

Scripts:
    echo    says the last user message back, then ends the turn (ChatML over the byte vocabulary)
    babble  letters that go on for ever, a function of the digest
    noise   a whole distribution, a function of the digest, for sampling tests

Not thread-safe; sleeps only through the `wait` it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from antiphon.engine.runner import Chunk, KvDescription, Logits, RunnerFault

START_ID, END_ID, VOCAB_SIZE = 256, 257, 258  # tokens/bytelevel.py

_LETTERS = b"etaoin shrdlu cmfwyp vbgkjqxz"
_MASK = 2**64 - 1


@dataclass(slots=True)
class Memory:
    """KV of one sequence: token and digest by position."""

    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)

    def write(self, tokens: list[int]) -> None:
        digest = self.digests[-1] if self.digests else 1
        for token in tokens:
            digest = ((digest ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
            digest ^= digest >> 29
            self.digests.append(digest)
        self.tokens += tokens

    @property
    def text(self) -> str:
        """What the tokens say; control tokens say nothing."""
        return bytes(token for token in self.tokens if token < START_ID).decode(errors="replace")


Script: TypeAlias = Callable[[Memory, Logits], None]
"""Fills a row that is -inf everywhere, given the memory of the sequence."""


def echo(memory: Memory, row: Logits) -> None:
    """Next byte of the last user message, read from the KV."""
    tokens = memory.tokens
    turns = [i for i, token in enumerate(tokens) if token == START_ID]
    if len(turns) < 2:
        row[END_ID] = 0.0
        return
    user, answer = turns[-2], turns[-1]
    end = tokens.index(END_ID, user) if END_ID in tokens[user:answer] else answer
    said = tokens[user + len("user\n") + 1 : end]
    position = len(tokens) - (answer + len("assistant\n") + 1)
    row[said[position] if 0 <= position < len(said) else END_ID] = 0.0


def babble(memory: Memory, row: Logits) -> None:
    """A letter or a blank, a function of everything held; never ends the turn."""
    row[_LETTERS[memory.digests[-1] % len(_LETTERS)]] = 0.0


def noise(memory: Memory, row: Logits) -> None:
    """Logits between 0 and 8 for every printable byte and the end of the turn."""
    seed = blake3(memory.digests[-1].to_bytes(8, "little")).digest(length=2 * (127 - 32) + 2)
    values = np.frombuffer(seed, np.uint16).astype(np.float32) / 8192.0
    row[32:127] = values[:-1]
    row[END_ID] = values[-1] - 2.0


SCRIPTS: dict[str, Script] = {"echo": echo, "babble": babble, "noise": noise}


_DESCRIPTION = KvDescription(
    architecture="scripted",
    rope_dimensions=0,
    rope_base=0.0,
    rope_scaling="none",
    rope_factor=1.0,
    rope_original_tokens=0,
    k_type="token",
    v_type="digest",
    kv_rotated=False,
    engine="scripted",
    engine_version="1",
    layout="tokens-digests-u64",
)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a step takes: a part of its own, one for each prompt token, one for each answer in it."""

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0

    def __call__(self, chunks: list[Chunk]) -> float:
        num_rows = sum(len(chunk.tokens) == 1 for chunk in chunks)
        num_prompt_tokens = sum(len(chunk.tokens) for chunk in chunks) - num_rows
        return self.step_s + self.prefill_token_s * num_prompt_tokens + self.decode_row_s * num_rows

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a step so long that its own part does not count; 0: prompts take no time."""
        return 1 / self.prefill_token_s if self.prefill_token_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedSettings:
    """Size and behaviour of a scripted runner. `kv_token_bytes`: 16, and what is more is padding."""

    context_tokens: int = 8192
    block_tokens: int = 16
    max_sequences: int = 64
    kv_token_bytes: int = 16
    step_s: Callable[[list[Chunk]], float] = StepTimes()
    prefill_tokens_per_s: float = 0.0  # said to be measured at start; 0: not
    fault_after: int | None = None  # answer rows until every further step fails
    die_after: int | None = None  # answer rows until the runner breaks for good
    die_on: str | None = None  # a text; the runner breaks where a sequence holds it


class ScriptedRunner:
    """Implements `ModelRunner` over dictionaries."""

    def __init__(
        self, script: Script, settings: ScriptedSettings, wait: Callable[[float], None] = lambda s: None
    ) -> None:
        self.vocab_size = VOCAB_SIZE
        self.shares_blocks = True
        self.context_tokens = settings.context_tokens
        self.block_tokens = settings.block_tokens
        self.block_bytes = settings.kv_token_bytes * settings.block_tokens
        self.max_sequences = settings.max_sequences
        self.start_prefill_tokens_per_s = settings.prefill_tokens_per_s
        self._padding = bytes(self.block_bytes - 2 * 8 * settings.block_tokens)  # beside token and digest
        layout = _DESCRIPTION.layout + (f"+{len(self._padding)}" if self._padding else "")
        self.kv_description = replace(_DESCRIPTION, layout=layout)
        self._script = script
        self._settings = settings
        self._wait = wait
        self._open: dict[int, Memory] = {}
        self._kept: dict[int, Memory] = {}
        self._num_rows = 0
        self._rows = np.empty((settings.max_sequences, VOCAB_SIZE), np.float32)

    def open(self, sequence: int, blocks: list[int]) -> float:
        memory = Memory()
        for block in blocks:
            kept = self._kept[block]
            memory.tokens += kept.tokens
            memory.digests += kept.digests
        self._open[sequence] = memory
        return 0.0

    def run(self, chunks: list[Chunk]) -> Logits:
        settings = self._settings
        self._wait(settings.step_s(chunks))
        num_rows = 0
        rows = self._rows
        rows.fill(-np.inf)
        for chunk in chunks:
            memory = self._open[chunk.sequence]
            if len(memory.tokens) != chunk.start:
                raise RunnerFault(f"{len(memory.tokens)} positions held, the chunk starts at {chunk.start}")
            memory.write(chunk.tokens)
            if settings.die_on is not None and settings.die_on in memory.text:
                raise MemoryError("the scripted runner was told to die of this text")
            if chunk.wants_logits:
                self._script(memory, rows[num_rows])
                num_rows += 1
        self._num_rows += num_rows
        if settings.die_after is not None and self._num_rows > settings.die_after:
            raise MemoryError("the scripted runner was told to die")
        if settings.fault_after is not None and self._num_rows > settings.fault_after:
            raise RunnerFault("the scripted runner was told to fail")
        return rows[:num_rows]

    def keep(self, sequence: int, index: int, block: int) -> None:
        memory = self._open[sequence]
        part = slice(index * self.block_tokens, (index + 1) * self.block_tokens)
        self._kept[block] = Memory(memory.tokens[part], memory.digests[part])

    def close(self, sequence: int) -> None:
        self._open.pop(sequence, None)

    def drop(self, block: int) -> None:
        self._kept.pop(block, None)

    def export_blocks(self, blocks: list[int]) -> list[bytes]:
        kept = [self._kept[block] for block in blocks]
        return [
            np.array([memory.tokens, memory.digests], np.uint64).tobytes() + self._padding for memory in kept
        ]

    def import_block(self, block: int, payload: bytes | memoryview) -> None:
        if len(payload) != self.block_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes is no block")
        tokens, digests = np.frombuffer(payload, np.uint64, 2 * self.block_tokens).reshape(2, -1).tolist()
        self._kept[block] = Memory(tokens, digests)
