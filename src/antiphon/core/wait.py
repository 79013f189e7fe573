"""How long a request waits at a worker before the first of its tokens is computed.

One formula, for the router's costs and for what autoscalers read. Pure; seconds, tokens, sequences.
"""

from __future__ import annotations

ANSWER_TOKENS = 256  # what an answer is expected to have at most: what clients allow is far above


def wait_s(
    num_tokens: int, num_sequences: int, max_sequences: int, *, token_s: float, step_s: float
) -> float:
    """Seconds until it is its turn: the prompts before it, or the answers that hold all slots.

    `num_tokens` prompt tokens are still to be computed, each in `token_s`; `num_sequences` are there, of
    whom `max_sequences` run at once (0: not known). A step of answers takes `step_s`.
    """
    prompts_s = num_tokens * token_s
    num_over = num_sequences + 1 - max_sequences
    if not max_sequences or num_over <= 0:
        return prompts_s
    slot_s = num_over * ANSWER_TOKENS * 2 * step_s / max_sequences  # in steps of a full batch
    return max(prompts_s, slot_s)
