"""The namespace: within one, KV blocks of all workers are interchangeable.

Owns the digest of everything that changes what a block's bytes mean. Every field of
`NamespaceParts` counts, under its name and with its length, so that no two of them can be confused
and a field added later is counted without anyone thinking of it. What the weight file fixes
(layers, heads, tokenizer) is in its digest; what can be set beside the file has a field of its own.

Reads nothing: who loads the model knows these facts and says them.
"""

from __future__ import annotations

import dataclasses
import struct

from blake3 import blake3

NAMESPACE_BYTES = 8
VALUE_FORMAT = 1  # of header and MAC (codec.py): another one has keys of its own, in every upgrade

_CONTEXT = "antiphon 2026-11-30 kv namespace v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceParts:
    """All that decides what the bytes of a KV block mean. Strings are compared as they are."""

    weights: str  # digest of the file really served
    architecture: str  # as the model file names it: llama, qwen3 …
    rope_dimensions: int
    rope_base: float
    rope_scaling: str  # none, linear, yarn …
    rope_factor: float
    rope_original_tokens: int  # context before scaling; 0: none
    k_type: str  # f16, q8_0 …
    v_type: str
    kv_rotated: bool  # quantised KV is kept rotated (llama.cpp, unless LLAMA_ATTN_ROT_DISABLE)
    engine: str
    engine_version: str
    layout: str  # of the payload, as the engine's adapter calls it
    block_tokens: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    lora: str = ""  # digest of the adapter; empty: none
    value_format: int = VALUE_FORMAT


def namespace_of(parts: NamespaceParts) -> bytes:
    """`NAMESPACE_BYTES` bytes, equal exactly where all parts are (but for chance, 2⁻⁶⁴)."""
    hasher = blake3(derive_key_context=_CONTEXT)
    for field in dataclasses.fields(parts):
        for part in (field.name.encode(), _canonical(getattr(parts, field.name))):
            hasher.update(len(part).to_bytes(4, "little") + part)
    return hasher.digest(NAMESPACE_BYTES)


def _canonical(value: str | float) -> bytes:
    """10000 and 10000.0 are one number."""
    return value.encode() if isinstance(value, str) else struct.pack("<d", value)
