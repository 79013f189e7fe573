"""Log probabilities: spelled as clients read them, in the two shapes that OpenAI's APIs have.

JSON knows no infinity: what is not finite is written as `FLOOR`. Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from antiphon.core.generation import TokenLogprobs
from antiphon.gateway.models import ServedModel
from antiphon.gateway.reply import CompletionLogprobs, TokenLogprob, TopLogprob

FLOOR = -9999.0


class ScoredToken(msgspec.Struct, frozen=True):
    """A chosen token with its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs


def spelled(token: ScoredToken, model: ServedModel) -> TokenLogprob:
    """With its own bytes: those of all tokens joined are the text's."""
    name, its_bytes = _spelling(token.token_id, model)
    top = [
        TopLogprob(name, finite(logprob), its_bytes)
        for token_id, logprob in token.logprobs.top
        for name, its_bytes in (_spelling(token_id, model),)
    ]
    return TokenLogprob(name, finite(token.logprobs.chosen), its_bytes, top)


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Columns of equal length. `offset` counts the characters before the first of these tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(decoder.decode(bytes(token.bytes or ())))
    return CompletionLogprobs(
        tokens=[token.token for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[_alternatives(token) for token in tokens],
        text_offset=offsets,
    )


def finite(logprob: float) -> float:
    """As JSON can say it: from `FLOOR` to 0."""
    return min(logprob, 0.0) if logprob > FLOOR else FLOOR  # NaN compares false


def _alternatives(token: TokenLogprob) -> dict[str, float]:
    """The best tokens and the chosen one. Of tokens that are spelled alike the best stays."""
    scores: dict[str, float] = {}
    for top in token.top_logprobs:
        scores.setdefault(top.token, top.logprob)
    scores.setdefault(token.token, token.logprob)
    return scores


def _spelling(token_id: int, model: ServedModel) -> tuple[str, list[int] | None]:
    is_control = token_id in model.control_ids
    return model.tokenizer.name(token_id), None if is_control else list(model.tokenizer.piece(token_id))
