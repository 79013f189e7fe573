"""What the gateway's unit tests share: a served model, accounts, answers that are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from antiphon.core.generation import Generation, Sampling, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.models import ServedModel
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.tokens.textmodel import load_text_model
from support.gateways import MODEL
from support.loopback import frames_of, worker_info

MakeAnswer = Callable[..., Answer]


@pytest.fixture(scope="session")
def model() -> ServedModel:
    """The byte-level model, alias included."""
    return ServedModel(load_text_model(MODEL), MODEL.aliases)


@pytest.fixture
def account() -> Account:
    """A request that was just accepted."""
    return Account("POST", None)


@pytest.fixture
def say() -> MakeAnswer:
    """`say("text", n=2, per_step=3)`: an answer whose choices have said this text and ended."""

    def make(
        text: str | bytes | Sequence[int],
        *,
        n: int = 1,
        per_step: int = 1,
        finish: Terminal = Terminal.STOP,
        logprobs: int | None = None,
    ) -> Answer:
        ids = list(text.encode() if isinstance(text, str) else text)
        sampling = Sampling(seed=1, max_tokens=len(ids) + 1, logprobs=logprobs)
        generation = Generation(id="g", model="scripted", sampling=sampling, n=n)
        answer = Answer(generation)
        Attempt(answer, generation).attach(worker_info(), lambda *_: None)
        for frame in frames_of(generation, ids, per_step, finish, cached=3):
            for output in frame:
                answer.deliver(output)
        return answer

    return make
