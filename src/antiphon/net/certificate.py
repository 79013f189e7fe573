"""The certificate that a server shows, and shows anew when its files change, without a restart.

Invariants: a pair is loaded into a context of its own, whole, before any client sees it, so a pair that does
not fit changes nothing; connections that are open go on with the pair they began with; TLS 1.2 at least.
Files are looked at every `POLL_S`. Where they cannot be loaded that is said once for each state of them.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from antiphon.core.errors import BadRequest
from antiphon.net.notafter import BadCertificate, not_after
from antiphon.obs.log import Logger

POLL_S = 5.0
WARN_S = 14 * 24 * 3600.0  # before its end

Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the chain, its own certificate first, and the key, which needs no password."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Pair:
    """What was loaded."""

    stamp: Stamp
    context: ssl.SSLContext
    ends_at: float  # Unix time


class ServerCertificate:
    """One of a server. `context` is what its listener is given, once for all."""

    def __init__(
        self,
        files: CertificateFiles,
        log: Logger,
        tell_end: Callable[[float], None] = lambda _: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`tell_end` gets the Unix time at which the certificate in use ends. Raises BadRequest."""
        self._files = files
        self._log = log
        self._tell_end = tell_end
        self._wall = wall
        self._pair = load(files)
        self.context = self._pair.context
        self.context.sni_callback = self._show  # called at each handshake, named host or not
        self._seen: Stamp | None = self._pair.stamp
        self._has_warned = False
        self._judge()

    async def run(self) -> None:
        """Look after the files until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.look()

    async def look(self) -> None:
        """Load the pair anew where the files have changed."""
        await asyncio.to_thread(self._look)
        self._judge()

    def _look(self) -> None:
        stamp: Stamp | None = None
        try:
            stamp = _stamp(self._files)
            if stamp == self._seen:
                return
            pair = _load(self._files)
        except (OSError, ValueError, BadCertificate) as error:
            if stamp != self._seen:
                self._log.error("tls.not_reloaded", reason=_why(error))
            self._seen = stamp
            return
        self._seen = pair.stamp
        self._pair = pair
        self._has_warned = False
        self._log.info("tls.reloaded", ends_in_days=round((pair.ends_at - self._wall()) / 86400, 1))

    def _judge(self) -> None:
        self._tell_end(self._pair.ends_at)
        left_s = self._pair.ends_at - self._wall()
        if left_s < WARN_S and not self._has_warned:
            self._has_warned = True
            self._log.warning("tls.ends_soon", days_left=round(left_s / 86400, 1))

    def _show(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._pair.context


def load(files: CertificateFiles) -> Pair:
    """What a server would show. Raises BadRequest where it cannot be shown."""
    try:
        return _load(files)
    except (OSError, ValueError, BadCertificate) as error:
        raise BadRequest(f"--tls-cert {files.certificate}, --tls-key {files.key}: {_why(error)}") from error


def trusting(ca: Path | None) -> ssl.SSLContext:
    """How a client checks servers: by these authorities, or by the system's. Raises BadRequest."""
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:  # ssl.SSLError is one
        raise BadRequest(f"{ca}: {_why(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load(files: CertificateFiles) -> Pair:
    """Raises OSError, ValueError, BadCertificate."""
    stamp = _stamp(files)  # before they are read: what changes meanwhile is seen at the next look
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.certificate, files.key, password="")  # never asked for at a terminal
    return Pair(stamp, context, not_after(files.certificate.read_text("ascii", errors="replace")))


def _stamp(files: CertificateFiles) -> Stamp:
    found = [path.stat() for path in (files.certificate, files.key)]
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "they cannot be loaded").replace("_", " ").lower()
        return f"{reason}: PEM files are needed, a key without a password, and the two must belong together"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
