"""What a generating request passes once it is understood, before any work is done for it.

Invariant: where this raises, nothing was computed and nothing stays reserved. What is reserved here is
given back by the account's close, on every way out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from antiphon.gateway.account import Account
from antiphon.gateway.models import ServedModels, no_model
from antiphon.gateway.schema import GeneratingRequest

Step: TypeAlias = Callable[[GeneratingRequest, Account], Awaitable[None]]


class CheckIn:
    """One a gateway."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._steps: list[Step] = []

    def add(self, step: Step) -> None:
        """Have requests pass this too, after what was added before. It raises for those that do not pass."""
        self._steps.append(step)

    async def __call__(self, request: GeneratingRequest, account: Account) -> None:
        """Let it pass. Raises NotFound for a model that is not there, or not for this caller."""
        caller = account.caller
        assert caller is not None  # CallerMiddleware: no request comes this far without one
        if not caller.grant.allows(request.model):
            raise no_model(request.model)  # the same words: they tell nobody what others may use
        self._models.require(request.model)
        for step in self._steps:
            await step(request, account)
