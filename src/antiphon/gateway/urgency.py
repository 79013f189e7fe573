"""How urgent a request is, and how long its client waits: from its headers, its body and its key.

Invariants: nothing a client sends makes a request more urgent than its key allows, or gives it more time
than the gateway does. A client that says nothing gets what its key has: people who chat are not asked to
send headers, so lowering is the client's business and the key's class the operator's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import Grant
from antiphon.gateway.schema import ChatRequest, GeneratingRequest

CLASS_HEADER = "x-antiphon-class"
TIMEOUT_HEADER = "x-antiphon-timeout"

_TIERS = {"priority": Priority.INTERACTIVE, "flex": Priority.BATCH}  # the others: as the key has it
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def class_name(priority: Priority) -> str:
    """As headers, logs and metrics spell it."""
    return priority.name.lower()


def priority_of(headers: Iterable[tuple[bytes, bytes]], request: GeneratingRequest, grant: Grant) -> Priority:
    """The class of a request: the least urgent of what the key has and the client says. Raises BadRequest."""
    said = _header(headers, CLASS_HEADER)
    wanted = grant.priority
    if said is not None:
        try:
            wanted = Priority[said.strip().upper()]
        except KeyError:
            names = ", ".join(map(class_name, Priority))
            raise BadRequest(f"The header '{CLASS_HEADER}' is one of: {names}.", param=CLASS_HEADER) from None
    tier = request.service_tier if isinstance(request, ChatRequest) else None
    return max(grant.priority, wanted, _TIERS.get(tier or "", grant.priority))


def timeout_of(headers: Iterable[tuple[bytes, bytes]], most_s: float) -> float:
    """Seconds that the whole answer may take. Raises BadRequest."""
    said = _header(headers, TIMEOUT_HEADER)
    if said is None:
        return most_s
    seconds = float(said) if _SECONDS.fullmatch(said) else math.nan
    if not seconds > 0:
        raise BadRequest(
            f"The header '{TIMEOUT_HEADER}' is a number of seconds above 0, like 30 or 2.5.",
            param=TIMEOUT_HEADER,
        )
    return min(seconds, most_s)


def tier_name(asked: str, priority: Priority) -> str:
    """The service tier that a request got, in OpenAI's words."""
    return asked if _TIERS.get(asked) is priority else "default"


def _header(headers: Iterable[tuple[bytes, bytes]], name: str) -> str | None:
    wanted = name.encode()
    values = [value.decode("latin-1").strip() for header, value in headers if header == wanted]
    if len(values) > 1:
        raise BadRequest(f"The header '{name}' stands more than once.", param=name)
    return values[0] if values else None
