"""Bounds on the head of a request, which uvicorn does not set: how long it may take, how large it may be.

A connection that brings its head byte by byte would hold a place for ever, one that never ends it would
hold memory. Invariants: a head is complete `HEAD_TIMEOUT_S` after its first byte (after the connection, for
the first one) or the connection ends; no more than `MAX_HEAD_BYTES`, and what one read brings besides,
are taken in. Between requests uvicorn's own keep-alive time counts. Bodies are parse.py's.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 * 2**10


class HeadBounds(HttpToolsProtocol):
    """uvicorn's HTTP protocol with these bounds."""

    _timer: asyncio.TimerHandle | None = None  # runs while a head is awaited
    _num_bytes = 0  # of that head, so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None:
            return
        self._num_bytes += len(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._has_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._num_bytes = 0
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _has_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
