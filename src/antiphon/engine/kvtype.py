"""Number formats of the KV cache: fewer bits, fewer bytes to keep and to send, less exact."""

from __future__ import annotations

import enum

import llama_cpp


class KvType(enum.StrEnum):
    """A format for K and V. The quantised ones need flash attention."""

    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"

    @property
    def is_quantised(self) -> bool:
        return self is not KvType.F16

    @property
    def ggml(self) -> int:
        """llama.cpp's number for it."""
        return _FORMATS[self][0]

    def num_values(self, num_bytes: int) -> int:
        """How many numbers so many bytes hold."""
        _, values, size = _FORMATS[self]
        return num_bytes // size * values


# llama.cpp's number, and a group of the format: so many values in so many bytes.
_FORMATS: dict[str, tuple[int, int, int]] = {
    KvType.F16: (llama_cpp.GGML_TYPE_F16, 1, 2),
    KvType.Q8_0: (llama_cpp.GGML_TYPE_Q8_0, 32, 34),
    KvType.Q4_0: (llama_cpp.GGML_TYPE_Q4_0, 32, 18),
}
