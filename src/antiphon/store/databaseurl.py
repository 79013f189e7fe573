"""URLs of databases: what they may say, and how they are shown.

    sqlite:///FILE
    postgresql://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=verify-full&sslrootcert=FILE
    postgresql://USER@/DATABASE?host=/FOLDER/OF/THE/SOCKET

Invariants: neither an error nor `str()` of a URL holds a password. Beyond this machine PostgreSQL is
spoken to over TLS, and only with who proves to be that host, unless the URL says `sslmode=disable`.
A password that the URL lacks comes from where libpq looks: PGPASSWORD, PGPASSFILE, ~/.pgpass.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from antiphon.core.errors import BadRequest

_FORMS = "write sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_PORT = 5432
_DISABLE, _VERIFY = "disable", "verify-full"
_QUERY = frozenset({"host", "port", "sslmode", "sslrootcert", "sslcert", "sslkey"})


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """A file."""

    file: Path

    def __str__(self) -> str:
        return URL.create("sqlite", database=str(self.file)).render_as_string()


@dataclass(frozen=True, slots=True)
class Tls:
    """How the server proves who it is, and we to it. Files; `ca` None: the system's authorities."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Checks the server's certificate and name. Raises BadRequest where a file is of no use."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # what ssl raises is one too
            reason = error.strerror or str(error)
            raise BadRequest(f"the database URL's certificates cannot be read: {reason}") from error
        return context


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """A database of a server. `host` is a name, an address, or the folder that its socket lies in."""

    url: URL  # as SQLAlchemy takes it, without a query
    host: str
    port: int
    tls: Tls | None

    def __str__(self) -> str:
        port = None if self.port == _PORT else self.port
        is_socket = self.host.startswith("/")
        host = None if is_socket else self.host
        shown = URL.create("postgresql", self.url.username, "***", host, port, self.url.database)
        if self.url.password is None:
            shown = shown._replace(password=None)
        text = shown.render_as_string()
        return f"{text}?host={self.host}" if is_socket else text


def parse(text: str) -> SqliteUrl | PostgresUrl:
    """Raises BadRequest, which does not repeat what was said."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # the latter where a port is no number
        raise BadRequest(f"that is no database URL of ours; {_FORMS}") from None
    if url.drivername in ("sqlite", "sqlite+aiosqlite"):
        return _sqlite(url)
    if url.drivername in ("postgresql", "postgres", "postgresql+asyncpg"):
        return _postgres(url)
    raise BadRequest(f"that is no database URL of ours; {_FORMS}")


def _sqlite(url: URL) -> SqliteUrl:
    if url.query:
        raise BadRequest("the URL of a file takes no settings; write sqlite:///FILE")
    if url.database in (None, "", ":memory:"):
        raise BadRequest("the database URL names no file; write sqlite:///FILE")
    return SqliteUrl(Path(url.database))


def _postgres(url: URL) -> PostgresUrl:
    query = {}
    for name, value in url.query.items():
        if name not in _QUERY:
            raise BadRequest(
                f"the database URL takes no {name[:32]!r}; there are {', '.join(sorted(_QUERY))}"
            )
        if not isinstance(value, str):
            raise BadRequest(f"the database URL says {name} more than once")
        query[name] = value
    host = url.host or query.get("host", "")
    port = query.get("port", str(_PORT)) if url.port is None else str(url.port)
    if not host or ("host" in query and url.host):
        raise BadRequest(
            f"the database URL must name one host, or a socket's folder: ?host=/FOLDER; {_FORMS}"
        )
    if not url.database:
        raise BadRequest(f"the database URL names no database; {_FORMS}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadRequest("the database URL's port must be a number from 1 to 65535")
    bare = url.set(drivername="postgresql+asyncpg", host=host, port=int(port), query={})
    return PostgresUrl(bare, host, int(port), _tls(host, query))


def _tls(host: str, query: dict[str, str]) -> Tls | None:
    mode = query.get("sslmode") or (_DISABLE if _stays_here(host) else _VERIFY)
    files = [query.get(name) for name in ("sslrootcert", "sslcert", "sslkey")]
    if mode not in (_DISABLE, _VERIFY):
        raise BadRequest(f"the database URL's sslmode is {_DISABLE} or {_VERIFY}: others check nobody")
    if (files[1] is None) != (files[2] is None):
        raise BadRequest("the database URL's sslcert and sslkey go together")
    if mode == _VERIFY and not host.startswith("/"):
        return Tls(*files)
    if any(files) or mode == _VERIFY:
        raise BadRequest(
            "the database URL has settings of TLS, but no TLS: say sslmode=verify-full and a HOST"
        )
    return None


def _stays_here(host: str) -> bool:
    """Whether what is sent there does not leave this machine."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
