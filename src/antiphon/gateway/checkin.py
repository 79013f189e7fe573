"""What a generating request passes once it is understood, before any work is done for it.

Invariant: where this raises, nothing was computed and nothing stays reserved. What is reserved here is
given back by the account's close, on every way out.
"""

from __future__ import annotations

from antiphon.gateway.account import Account
from antiphon.gateway.models import no_model
from antiphon.gateway.schema import GeneratingRequest


class CheckIn:
    """One a gateway."""

    async def __call__(self, request: GeneratingRequest, account: Account) -> None:
        """Let it pass. Raises NotFound for a model the caller may not use."""
        caller = account.caller
        assert caller is not None  # CallerMiddleware: no request comes this far without one
        if not caller.grant.allows(request.model):
            raise no_model(request.model)  # the same words: they tell nobody what others may use
