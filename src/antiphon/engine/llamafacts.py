"""What the KV of a loaded llama.cpp model depends on, read from the model and the process.

Facts only, for the KV namespace: two runners that agree on all of them (and on the weights) may take
over each other's blocks. Anything unsure is told apart rather than taken for equal.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping

import llama_cpp

from antiphon.engine.kvstate import LAYOUT
from antiphon.engine.kvtype import KvType
from antiphon.engine.runner import KvDescription

_MAX_VALUE_BYTES = 256


def describe_kv(
    model: int, kv_type: KvType, context_tokens: int, environment: Mapping[str, str]
) -> KvDescription:
    """The facts about a model run with this KV format and so many tokens a sequence."""
    architecture = _text(model, "general.architecture") or "unknown"

    def rope(key: str) -> str:
        return _text(model, f"{architecture}.rope.{key}")

    scaling = rope("scaling.type") or "none"
    original_tokens = int(rope("scaling.original_context_length") or 0)
    if original_tokens:  # some models have one set of factors for short contexts and one for long
        scaling += ", long" if context_tokens > original_tokens else ", short"
    return KvDescription(
        architecture=architecture,
        rope_dimensions=int(rope("dimension_count") or 0),
        rope_base=float(rope("freq_base") or 0.0),
        rope_scaling=scaling,
        rope_factor=float(rope("scaling.factor") or 1.0),
        rope_original_tokens=original_tokens,
        k_type=kv_type,
        v_type=kv_type,
        kv_rotated=kv_type.is_quantised and not _is_rotation_off(environment),
        engine="llama.cpp",
        engine_version=llama_cpp.__version__,
        layout=LAYOUT,
    )


def _is_rotation_off(environment: Mapping[str, str]) -> bool:
    """As llama.cpp reads its variable: C's `atoi`, anything but 0 is on."""
    number = re.match(r"\s*[+-]?\d+", environment.get("LLAMA_ATTN_ROT_DISABLE", ""))
    return number is not None and int(number.group()) != 0


def _text(model: int, key: str) -> str:
    """A value of the model file's metadata; empty where there is none."""
    buffer = ctypes.create_string_buffer(_MAX_VALUE_BYTES)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, _MAX_VALUE_BYTES)
    return buffer.value.decode(errors="replace") if length >= 0 else ""
