"""The one error of the benches: a measurement that would not be true."""

from __future__ import annotations


class BenchFault(Exception):
    """A server did not come up, an answer was wrong, a peer is missing. The message says what to do."""
