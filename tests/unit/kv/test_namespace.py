"""The namespace: every part counts, none can pass for another, and it never drifts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv.namespace import NAMESPACE_BYTES, NamespaceParts, namespace_of

PARTS = NamespaceParts(
    weights="9f86d081884c7d65",
    architecture="llama",
    rope_dimensions=64,
    rope_base=10000.0,
    rope_scaling="none",
    rope_factor=1.0,
    rope_original_tokens=0,
    k_type="f16",
    v_type="f16",
    kv_rotated=False,
    engine="llama.cpp",
    engine_version="0.3.36",
    layout="rows-1",
    block_tokens=32,
)
OTHERWISE = {
    "weights": "9f86d081884c7d66",
    "architecture": "qwen3",
    "rope_dimensions": 32,
    "rope_base": 1e6,
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_tokens": 32768,
    "k_type": "q8_0",
    "v_type": "q4_0",
    "kv_rotated": True,
    "engine": "vllm",
    "engine_version": "0.3.37",
    "layout": "rows-2",
    "block_tokens": 64,
    "tensor_parallel": 8,
    "pipeline_parallel": 2,
    "lora": "b5bb9d80",
    "value_format": 2,
}


def test_it_stays_what_it_is() -> None:
    """A change here orphans every block in every store: make it on purpose or not at all."""
    assert namespace_of(PARTS).hex() == "41f14a97f5105b7a"
    assert len(namespace_of(PARTS)) == NAMESPACE_BYTES


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(NamespaceParts)])
def test_every_part_counts(name: str) -> None:
    """Workers that differ in any one part share nothing. A new part must be given its line here."""
    assert namespace_of(dataclasses.replace(PARTS, **{name: OTHERWISE[name]})) != namespace_of(PARTS)


@given(words=st.lists(st.text(max_size=4), min_size=8, max_size=8), other=st.data())
def test_parts_cannot_be_confused(words: list[str], other: st.DataObject) -> None:
    """Moving characters between neighbouring words never gives the same namespace."""
    names = ("weights", "architecture", "k_type", "v_type", "engine", "engine_version", "layout", "lora")
    moved = other.draw(st.permutations(words))
    one = dataclasses.replace(PARTS, **dict(zip(names, words, strict=True)))
    two = dataclasses.replace(PARTS, **dict(zip(names, moved, strict=True)))
    assert (namespace_of(one) == namespace_of(two)) == (one == two)


def test_a_word_cannot_reach_into_the_next() -> None:
    """Not even one that spells the next field's name: lengths are part of the input."""
    one = dataclasses.replace(PARTS, k_type="a", v_type="bv_typec")
    two = dataclasses.replace(PARTS, k_type="av_typeb", v_type="c")
    assert namespace_of(one) != namespace_of(two)


def test_a_number_is_a_number() -> None:
    """One worker reads the base from a file as 10000, another as 10000.0: they share."""
    assert namespace_of(dataclasses.replace(PARTS, rope_base=10000)) == namespace_of(PARTS)
