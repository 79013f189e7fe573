"""GGUF files made for a test: a header of our own making, no tensors."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

Pair = tuple[str, int, object]


class Gguf:
    """Writes GGUF headers. A pair is (key, kind, value); an array's value is (element kind, elements)."""

    U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
    LAYOUTS = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}  # noqa: RUF012 - a constant

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, data: bytes, name: str = "tiny.gguf") -> Path:
        path = self._folder / name
        path.write_bytes(data)
        return path

    def header(self, pairs: list[Pair], version: int = 3, num_pairs: int | None = None) -> bytes:
        count = len(pairs) if num_pairs is None else num_pairs
        return b"GGUF" + struct.pack("<IQQ", version, 0, count) + b"".join(map(self._pair, pairs))

    def text(self, value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def _scalar(self, kind: int, value: object) -> bytes:
        if kind == self.STRING:
            return self.text(str(value))
        return struct.pack(self.LAYOUTS[kind], value)

    def _pair(self, pair: Pair) -> bytes:
        key, kind, value = pair
        head = self.text(key) + struct.pack("<I", kind)
        if kind != self.ARRAY:
            return head + self._scalar(kind, value)
        assert isinstance(value, tuple)
        element_kind, elements = value
        body = b"".join(self._scalar(element_kind, element) for element in elements)
        return head + struct.pack("<IQ", element_kind, len(elements)) + body

    def sentencepiece(self, add_bos: bool) -> list[Pair]:
        """A Llama-style vocabulary: three control tokens, all bytes, two words."""
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi"]
        kinds = [2, 3, 3, *[6] * 256, 1, 1]
        return [
            ("general.architecture", self.STRING, "llama"),
            ("llama.context_length", self.U32, 128),
            ("tokenizer.ggml.model", self.STRING, "llama"),
            ("tokenizer.ggml.tokens", self.ARRAY, (self.STRING, tokens)),
            ("tokenizer.ggml.scores", self.ARRAY, (self.F32, [0.0] * len(tokens))),
            ("tokenizer.ggml.token_type", self.ARRAY, (self.I32, kinds)),
            ("tokenizer.ggml.bos_token_id", self.U32, 1),
            ("tokenizer.ggml.eos_token_id", self.U32, 2),
            ("tokenizer.ggml.add_bos_token", self.BOOL, add_bos),
        ]


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Gguf:
    return Gguf(tmp_path_factory.mktemp("gguf"))
