"""Log probabilities in the two shapes that OpenAI's APIs have for them.

JSON knows no infinity: what is not finite is written as `FLOOR`. Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from antiphon.gateway.models import ServedModel
from antiphon.gateway.reply import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from antiphon.gateway.text import ScoredToken

FLOOR = -9999.0


def chat_logprobs(tokens: Sequence[ScoredToken], model: ServedModel) -> ChatLogprobs:
    """One entry a token, each with its own bytes: joined they are the text's."""
    return ChatLogprobs([_chat_entry(token, model) for token in tokens])


def completion_logprobs(tokens: Sequence[ScoredToken], model: ServedModel, offset: int) -> CompletionLogprobs:
    """Columns of equal length. `offset` counts the characters before the first of these tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(decoder.decode(model.tokenizer.piece(token.token_id)))
    return CompletionLogprobs(
        tokens=[model.tokenizer.name(token.token_id) for token in tokens],
        token_logprobs=[_finite(token.logprobs.chosen) for token in tokens],
        top_logprobs=[_alternatives(token, model) for token in tokens],
        text_offset=offsets,
    )


def _chat_entry(token: ScoredToken, model: ServedModel) -> TokenLogprob:
    name, spelled = _spelling(token.token_id, model)
    top = [TopLogprob(*_spelled(token_id, logprob, model)) for token_id, logprob in token.logprobs.top]
    return TokenLogprob(name, _finite(token.logprobs.chosen), spelled, top)


def _alternatives(token: ScoredToken, model: ServedModel) -> dict[str, float]:
    """The best tokens and the chosen one. Of tokens that are spelled alike the best stays."""
    scores: dict[str, float] = {}
    for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.chosen)):
        scores.setdefault(model.tokenizer.name(token_id), _finite(logprob))
    return scores


def _spelled(token_id: int, logprob: float, model: ServedModel) -> tuple[str, float, list[int] | None]:
    name, spelled = _spelling(token_id, model)
    return name, _finite(logprob), spelled


def _spelling(token_id: int, model: ServedModel) -> tuple[str, list[int] | None]:
    is_control = token_id in model.control_ids
    return model.tokenizer.name(token_id), None if is_control else list(model.tokenizer.piece(token_id))


def _finite(logprob: float) -> float:
    return min(logprob, 0.0) if logprob > FLOOR else FLOOR  # NaN compares false
