"""What the KV namespace is made of: what llama.cpp is told in the environment counts as it reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.engine import llamafacts
from antiphon.engine.kvtype import KvType
from antiphon.engine.llamacontext import free_model, load_model
from antiphon.engine.llamafacts import describe_kv

_METADATA = {
    "general.architecture": "phi3",
    "phi3.rope.dimension_count": "96",
    "phi3.rope.freq_base": "10000.000000",
    "phi3.rope.scaling.type": "longrope",
    "phi3.rope.scaling.factor": "2.5",
    "phi3.rope.scaling.original_context_length": "4096",
}


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A model file's metadata, to be changed at will."""
    values = dict(_METADATA)
    monkeypatch.setattr(llamafacts, "_text", lambda model, key: values.get(key, ""))
    return values


def test_rope_is_described_with_its_scaling(metadata: dict[str, str]) -> None:
    """Long and short contexts of such a model have other K values at the same position."""
    short, long = (describe_kv(0, KvType.F16, tokens, {}) for tokens in (4096, 4097))
    assert (short.rope_scaling, long.rope_scaling) == ("longrope, short", "longrope, long")
    assert (short.rope_dimensions, short.rope_base, short.rope_factor) == (96, 10000.0, 2.5)
    assert short.rope_original_tokens == 4096


def test_what_a_model_file_leaves_out_has_a_value(metadata: dict[str, str]) -> None:
    """No scaling is none, whatever the context."""
    metadata.clear()
    one, other = (describe_kv(0, KvType.F16, tokens, {}) for tokens in (10, 100_000))
    assert one == other
    assert (one.architecture, one.rope_scaling, one.rope_factor) == ("unknown", "none", 1.0)


@pytest.mark.parametrize(
    ("value", "is_rotated"),
    [("", True), ("0", True), ("no", True), ("1", False), (" 2x", False), ("-1", False), ("00", True)],
)
def test_rotation_is_read_as_llama_cpp_reads_it(
    metadata: dict[str, str], value: str, is_rotated: bool
) -> None:
    """C's atoi; and only quantised KV is rotated."""
    environment = {"LLAMA_ATTN_ROT_DISABLE": value}
    assert describe_kv(0, KvType.Q8_0, 100, environment).kv_rotated is is_rotated
    assert not describe_kv(0, KvType.F16, 100, environment).kv_rotated


@pytest.mark.model
def test_the_built_in_models_facts(model_path: Path) -> None:
    """Read from the loaded model itself."""
    model = load_model(model_path)
    description = describe_kv(model, KvType.F16, 4096, {})
    free_model(model)
    assert (description.architecture, description.rope_dimensions) == ("llama", 64)
    assert (description.rope_base, description.rope_scaling) == (100_000.0, "none")
    assert description.engine == "llama.cpp"
