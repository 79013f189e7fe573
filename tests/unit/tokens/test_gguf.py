"""tokens.gguf on vocabularies made for the test; the contract suite covers what all tokenizers share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from antiphon.core.errors import BadRequest
from antiphon.tokens.gguf import GgufTokenizer
from antiphon.tokens.prompt import PromptBuilder
from antiphon.tokens.template import ChatMessage, ChatTemplate

if TYPE_CHECKING:
    from .conftest import Gguf

UNKNOWN, BOS, EOS = 0, 1, 2


@pytest.fixture(params=[True, False], ids=["add-bos", "no-bos"])
def vocabulary(request: pytest.FixtureRequest, gguf: Gguf) -> Iterator[tuple[GgufTokenizer, bool]]:
    tokenizer = GgufTokenizer(gguf.write(gguf.header(gguf.sentencepiece(request.param))))
    yield tokenizer, request.param
    tokenizer.close()


def test_bos_only_where_the_vocabulary_asks_for_it(vocabulary: tuple[GgufTokenizer, bool]) -> None:
    """The file's add_bos decides, not the mere existence of a BOS token."""
    tokenizer, adds_bos = vocabulary
    assert tokenizer.bos_id == (BOS if adds_bos else None)
    assert tokenizer.end_ids == (EOS,)
    assert tokenizer.special_tokens == {"<unk>": UNKNOWN, "<s>": BOS, "</s>": EOS}


def test_bytes_without_a_word_fall_back_and_join_again(vocabulary: tuple[GgufTokenizer, bool]) -> None:
    """A character without a token of its own comes as its UTF-8 bytes, one token each."""
    tokenizer, _ = vocabulary
    ids = tokenizer.encode("é🙂")
    pieces = [tokenizer.piece(i) for i in ids]
    assert b"".join(pieces).decode().lstrip() == "é🙂"
    assert sum(len(piece) == 1 for piece in pieces) >= 6
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("source", ["{{ bos_token }}hi", "hi"])
def test_bos_starts_a_chat_once(vocabulary: tuple[GgufTokenizer, bool], source: str) -> None:
    """A template that spells BOS gets one, one that does not gets one too where it is wanted."""
    tokenizer, adds_bos = vocabulary
    prompts = PromptBuilder(tokenizer, ChatTemplate(source, bos="<s>", eos="</s>"))
    ids = prompts.chat([ChatMessage("user", "x")])
    assert ids.count(BOS) == int(adds_bos or "bos_token" in source)
    assert (ids[0] == BOS) == bool(ids.count(BOS))
    assert prompts.text("<s>hi")[:1] == ([BOS] if adds_bos else tokenizer.encode("<s>hi")[:1])


def test_a_closed_vocabulary_says_so(gguf: Gguf) -> None:
    """Freed memory is never touched: encode raises, close may be called again."""
    tokenizer = GgufTokenizer(gguf.write(gguf.header(gguf.sentencepiece(add_bos=True))))
    tokenizer.close()
    tokenizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        tokenizer.encode("hi")


def test_a_file_without_vocabulary_is_a_bad_request(
    gguf: Gguf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp's complaint goes to Python's logging, not to the terminal."""
    path = gguf.write(gguf.header([("general.architecture", gguf.STRING, "llama")]), "bare.gguf")
    with caplog.at_level(logging.ERROR, "llama.cpp"), pytest.raises(BadRequest, match=r"bare\.gguf"):
        GgufTokenizer(path)
    assert any(record.name == "llama.cpp" for record in caplog.records)
    assert capfd.readouterr() == ("", "")
