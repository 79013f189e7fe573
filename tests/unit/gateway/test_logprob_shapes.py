"""Log probabilities as clients read them."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import TokenLogprobs
from antiphon.gateway.logprobs import FLOOR, ScoredToken, completion_logprobs, spelled
from antiphon.gateway.models import ServedModel
from antiphon.gateway.reply import CompletionLogprobs
from antiphon.tokens.bytelevel import IM_END


def scored(token_id: int, chosen: float = -0.5, top: list[tuple[int, float]] | None = None) -> ScoredToken:
    return ScoredToken(token_id, TokenLogprobs(chosen, top or []))


def columns_of(model: ServedModel, *tokens: ScoredToken, offset: int = 0) -> CompletionLogprobs:
    return completion_logprobs([spelled(token, model) for token in tokens], offset)


def test_chat_entries(model: ServedModel) -> None:
    """Name, score and bytes, of the chosen token and of the best ones in their order."""
    entry = spelled(scored(104, -0.5, [(105, -0.1), (104, -0.5)]), model)
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [104])
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("i", -0.1), ("h", -0.5)]


def test_control_tokens_have_no_bytes(model: ServedModel) -> None:
    """They stand for no text."""
    entry = spelled(scored(104, top=[(IM_END, -1.0)]), model)
    assert entry.top_logprobs[0].bytes is None
    assert entry.top_logprobs[0].token == "<|im_end|>"


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan, -1e300, 0.5, -0.0])
def test_json_gets_finite_numbers(model: ServedModel, logprob: float) -> None:
    """Minus infinity is the floor; nothing is above zero; NaN does not pass."""
    token = spelled(scored(104, logprob, [(104, logprob)]), model)
    assert FLOOR <= token.logprob <= 0
    for body in (token, completion_logprobs([token], 0)):
        assert json.dumps(msgspec.to_builtins(body), allow_nan=False)


@given(ids=st.lists(st.integers(0, 255), max_size=20), offset=st.integers(0, 1000))
def test_columns_are_equally_long(model: ServedModel, ids: list[int], offset: int) -> None:
    """One row a token, offsets from the given one on, never falling."""
    columns = columns_of(model, *(scored(i, top=[(i, -0.5)]) for i in ids), offset=offset)
    lengths = {
        len(columns.tokens),
        len(columns.token_logprobs),
        len(columns.top_logprobs),
        len(columns.text_offset),
    }
    assert lengths == {len(ids)}
    assert columns.text_offset == sorted(columns.text_offset)
    assert not ids or columns.text_offset[0] == offset


def test_offsets_count_characters(model: ServedModel) -> None:
    """Not bytes: the tokens of one character share its offset, or its end."""
    columns = columns_of(model, *map(scored, "aéb".encode()), offset=10)
    assert columns.text_offset == [10, 11, 11, 12]


def test_the_chosen_token_is_among_the_alternatives(model: ServedModel) -> None:
    """Also where it was not one of the best; of tokens spelled alike the best score stays."""
    columns = columns_of(model, scored(104, -3.0, [(105, -0.1)]))
    assert columns.top_logprobs == [{"i": -0.1, "h": -3.0}]
    columns = columns_of(model, scored(0xC3, -3.0, [(0xC4, -0.1)]))
    assert columns.top_logprobs == [{"\ufffd": -0.1}]
