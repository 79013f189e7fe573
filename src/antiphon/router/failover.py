"""What is asked of the next worker when an answer goes on there. Pure.

A choice that has begun goes on from the ids received: the next worker gets prompt and answer so far,
the same seed and the same positions, and so draws the same tokens. Each such choice is a generation of
its own; an answer of which nothing has arrived is asked for once more, all choices together.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

import msgspec

from antiphon.core.generation import Generation, WorkerInfo
from antiphon.router.answer import Answer


class Cause(enum.StrEnum):
    """Why an answer moves."""

    DEATH = "death"  # its worker died, or its link
    DRAIN = "drain"  # its worker stops and could not finish it
    STALL = "stall"  # its worker is silent while others speak
    ERROR = "error"  # the step that computed it failed
    FIRST_TOKEN = "first_token"  # its first token is overdue
    TOKEN = "token"  # the next one is
    HEDGE = "hedge"  # its first token is slow: computed twice, the first one wins
    UNSPLIT = "unsplit"  # its prompt was to be computed elsewhere and was not, or its worker is gone since


def may_take(answer: Answer, worker: WorkerInfo | None) -> bool:
    """Whether this worker's tokens may follow those received: same namespace, same text."""
    if worker is None or worker.model != answer.generation.model:
        return False
    began_at = answer.worker if answer.has_started else None
    return began_at is None or worker.namespace == began_at.namespace


def continuations(
    generation: Generation,
    received: Sequence[array[int]],
    choices: Sequence[int],
    move: int,
    left_s: float | None,
) -> list[Generation]:
    """The generations that bring the rest of these `choices`. Ids are new ones: the old worker may live.

    `move` counts the moves of this answer from 1; `left_s` is what remains of its time. A choice that has
    all its tokens must not be among them.
    """
    name = f"{generation.id}~{move}"
    if len(choices) == generation.n and not any(received):
        return [msgspec.structs.replace(generation, id=name, timeout_s=left_s)]
    return [
        msgspec.structs.replace(
            generation,
            id=f"{name}.{choice}",
            choice=choice,
            token_ids=generation.token_ids + received[choice].tolist(),
            timeout_s=left_s,
        )
        for choice in choices
    ]
