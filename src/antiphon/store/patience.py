"""How long anything here waits for a database, and how many connections it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """`patience_s` bounds each wait: for a connection, a lock, an answer."""

    patience_s: float
    num_connections: int
