"""Request traces with block ids, as public sources give them: one JSON object a line.

Each line has `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`: one id for each
block of 512 input tokens, where equal ids mean equal blocks after equal prefixes. Requests with one
timestamp are spread evenly up to the next: one of the traces knows its times to 3 s only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from bench.errors import BenchFault

BLOCK_TOKENS = 512
CONVERSATION = "mooncake_conversation.jsonl"
SYNTHETIC = "mooncake_synthetic.jsonl"


class Line(msgspec.Struct, frozen=True):
    """One request as it stands in the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks`: the ids of its prompt's blocks; the last may be a part of one."""

    at_s: float
    num_tokens: int
    num_answer_tokens: int
    blocks: tuple[int, ...]

    @property
    def session(self) -> bytes:
        """What its conversation has in common: the block after the one that all may share."""
        first_own = next((block for block in self.blocks if block > 0), 0)  # the public ones share block 0
        return str(first_own).encode()


def read(folder: Path | None, name: str, most: int | None = None) -> list[Request]:
    """The requests of a trace, by time; the first `most` of them."""
    path = folder / name if folder else None
    if path is None or not path.is_file():
        raise BenchFault(f"needs the trace {name}: give its folder with --traces DIR or ANTIPHON_TRACES")
    decode = msgspec.json.Decoder(Line).decode
    return spread([decode(line) for line in path.read_bytes().splitlines()[:most]])


def spread(lines: Sequence[Line]) -> list[Request]:
    """Requests with the times between two timestamps shared out evenly."""
    groups = [(at_ms, list(group)) for at_ms, group in groupby(lines, lambda line: line.timestamp)]
    ends_ms = [at_ms for at_ms, _ in groups[1:]] + [groups[-1][0] if groups else 0.0]
    return [
        Request(
            (at_ms + (end_ms - at_ms) * number / len(group)) / 1000,
            line.input_length,
            line.output_length,
            line.hash_ids,
        )
        for (at_ms, group), end_ms in zip(groups, ends_ms, strict=True)
        for number, line in enumerate(group)
    ]
