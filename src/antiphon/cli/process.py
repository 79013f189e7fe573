"""Runs one gateway or worker process from the command line.

Owns what both have in common: uvloop, the lifeline to `antiphon serve`, and the two ways of saying
how far it is: events for `serve`, plain lines for a person.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from antiphon.cli.events import Progress, Ready, tell
from antiphon.cli.options import base_url
from antiphon.core.errors import BadRequest
from antiphon.worker.lifeline import follow_parent


class Reporter:
    """Says how far a process is, to `antiphon serve` or to a person."""

    def __init__(self, name: str, host: str, *, supervised: bool, has_tls: bool = False) -> None:
        self._name = name
        self._host = host
        self._supervised = supervised
        self._has_tls = has_tls
        self._last = ""

    def progress(self, text: str, fraction: float) -> None:
        """Long work goes on."""
        if self._supervised:
            tell(Progress(text, fraction))
        elif text != self._last:
            self._last = text
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def ready(self, port: int) -> None:
        """The process answers from now on."""
        if self._supervised:
            tell(Ready(port))
        else:
            url = base_url(self._host, port, has_tls=self._has_tls)
            print(f"antiphon {self._name} listens at {url}", flush=True)


def run_process(main: Coroutine[Any, Any, None], host: str, port: int, *, supervised: bool) -> int:
    """Run to the end; 0. Raises BadRequest where the address cannot be had."""
    if supervised:
        follow_parent()
    try:
        uvloop.run(main)
    except OSError as error:
        is_address = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
        if is_address or isinstance(error, socket.gaierror):
            raise address_error(error, host, port) from error
        raise
    return 0


def address_error(error: OSError, host: str, port: int) -> BadRequest:
    """Why a server cannot listen there, for the person who chose it."""
    reasons = {
        errno.EADDRINUSE: f"port {port} on {host} is in use: free it, or choose another with --port",
        errno.EACCES: f"port {port} is reserved for root: choose one above 1023 with --port",
    }
    return BadRequest(reasons.get(error.errno or 0, f"cannot listen on {host}: {error.strerror}"))
