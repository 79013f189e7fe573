"""Who may use a route. Each route has one of these classes, and none is given by default.

    class      no key, where none is needed   client token   key   admin key
    OPEN       yes                            yes            yes   yes        asked of nobody: see middleware
    CLIENT     yes                            yes            yes   yes
    CALLER     yes                            403            yes   yes
    KEY        403                            403            yes   yes
    ADMIN      403                            403            403   yes

That a caller is known at all, or is refused with 401, is decided before, for all routes but OPEN ones.
"""

from __future__ import annotations

import enum

from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.core.errors import Forbidden
from antiphon.gateway.account import account_of
from antiphon.gateway.callers import Caller


class Access(enum.Enum):
    """The class of a route."""

    OPEN = "open"
    CLIENT = "client"
    CALLER = "caller"
    KEY = "key"
    ADMIN = "admin"


class Guarded:
    """An endpoint behind its class."""

    def __init__(self, endpoint: ASGIApp, access: Access) -> None:
        self._endpoint = endpoint
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.access is not Access.OPEN:
            require_access(self.access, account_of(scope).caller)
        await self._endpoint(scope, receive, send)


def require_access(access: Access, caller: Caller | None) -> None:
    """Raises Forbidden where this caller may not use routes of this class."""
    assert caller is not None  # CallerMiddleware: no request comes this far without one
    if access is Access.CLIENT:
        return
    if caller.token is not None:
        raise Forbidden("Client tokens may only ask models and list them. Use a key for this.")
    if access is Access.KEY and caller.key_id is None:
        raise Forbidden("This needs an API key. Keys are made by the operator of this server.")
    if access is Access.ADMIN and not caller.grant.is_admin:
        raise Forbidden("This needs an admin key. Keys are made by the operator of this server.")
