"""A request's wishes as the engine's sampling, clamped to what the model has room for.

Pure. Everything is decided here and never again below: the seed is always assigned, `max_tokens`
fits the context, greedy is temperature 0.
"""

from __future__ import annotations

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Sampling
from antiphon.core.randomness import fresh_seed
from antiphon.gateway.models import ServedModel
from antiphon.gateway.schema import GeneratingRequest, SharedFields

_GREEDY_BELOW = 1e-5  # a softmax at lower temperatures is greedy in float32, or overflows
_INT32_MAX = 2**31 - 1


def sampling_of(request: GeneratingRequest, model: ServedModel, room: int) -> Sampling:
    """For an answer of at most `room` tokens. Raises BadRequest."""
    limit = request.answer_limit
    max_tokens = room if limit is None else min(limit, room)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(
            f"Invalid value for 'min_tokens': it is above the {max_tokens} tokens the answer may have.",
            param="min_tokens",
        )
    temperature = 1.0 if request.temperature is None else request.temperature
    return Sampling(
        seed=fresh_seed() if request.seed is None else request.seed,
        max_tokens=max_tokens,
        logit_bias=_logit_bias(request, model),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=min(max(request.top_k or 0, 0), _INT32_MAX),
        min_p=request.min_p or 0.0,
        top_p=1.0 if request.top_p is None else request.top_p,
        logprobs=request.num_logprobs,
        stop_ids=() if request.ignore_eos else model.tokenizer.end_ids,
        min_tokens=min_tokens,
    )


def _logit_bias(request: SharedFields, model: ServedModel) -> tuple[tuple[int, float], ...]:
    bias = request.logit_bias or {}
    for token_id in bias:
        if not 0 <= token_id < model.tokenizer.vocab_size:
            raise BadRequest(
                f"Invalid key in 'logit_bias': token ids are 0 to {model.tokenizer.vocab_size - 1}.",
                param="logit_bias",
            )
    return tuple(sorted(bias.items()))
