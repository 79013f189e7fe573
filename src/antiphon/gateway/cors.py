"""Which web pages may read our answers: CORS by the operator's list of origins.

Callers show keys in a header, which no browser adds by itself, so credentials in the sense of CORS are never
allowed, and `*` opens no more than a key does. Invariants: without a list no response says anything of
CORS; with one, every response does that leaves the application, errors and streams among them. Preflights are
answered here: they carry no key, and are no requests to anybody's account.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from antiphon.core.errors import BadRequest

ANY = "*"
_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535
_ORIGIN = re.compile(
    r"(?P<site>(?P<scheme>https?)://([a-z0-9][a-z0-9._-]*|\[[0-9a-f:.]+\]))(:(?P<port>[1-9][0-9]{0,4}))?"
)
_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
_PREFLIGHT_AGE_S = 600


class Origins:
    """The origins of one gateway's operator."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        """Raises BadRequest for what is no origin."""
        self._origins = frozenset(map(check_origin, origins))

    def allow(self, origin: str) -> bool:
        """Whether pages of this origin may read answers."""
        return ANY in self._origins or origin in self._origins

    def middleware(self) -> list[Middleware]:
        """What goes around the whole application; nothing where there are no origins."""
        if not self._origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=sorted(self._origins),
                allow_methods=_METHODS,
                allow_headers=(ANY,),
                expose_headers=(ANY,),
                max_age=_PREFLIGHT_AGE_S,
            )
        ]


def check_origin(text: str) -> str:
    """The origin, spelled as browsers spell it. Raises BadRequest."""
    if text == ANY:
        return text
    parts = _ORIGIN.fullmatch(text.lower())
    if parts is None or int(parts["port"] or 0) > _MAX_PORT:
        raise BadRequest(
            f"{text!r} is no origin: an origin is https://HOST or http://HOST:PORT without a path, "
            f"or {ANY} for all"
        )
    is_default = parts["port"] is None or int(parts["port"]) == _PORTS[parts["scheme"]]
    return parts["site"] if is_default else f"{parts['site']}:{parts['port']}"
