"""What a process that `antiphon serve` started says of itself: one JSON object a line on stdout.

Owns the two events and their form. A line that is no event (a library printed something) is None,
never an error: the reader passes it on as text.
"""

from __future__ import annotations

import sys

import msgspec


class Progress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """Long work goes on. `fraction` is None where nobody knows how much is left."""

    text: str
    fraction: float | None = None


class Ready(msgspec.Struct, frozen=True, tag_field="event", tag="ready"):
    """The process answers at this port from now on."""

    port: int


Event = Progress | Ready

_decode = msgspec.json.Decoder(Event).decode


def tell(event: Event) -> None:
    """Write an event to this process's stdout, at once."""
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def read(line: bytes) -> Event | None:
    """The event on a line, if it is one."""
    try:
        return _decode(line)
    except msgspec.DecodeError:
        return None
