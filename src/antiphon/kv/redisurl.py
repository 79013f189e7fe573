"""The URL of a block store, read: where the servers are, how to log in, how to encrypt.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]                        one server
    unix://[[USER]:PASSWORD@]/PATH[?db=N]                             one server, same machine
    redis-sentinel://[…@]HOST[:PORT],HOST[:PORT],…/MASTER[/DB]        the master these Sentinels name
    redis-cluster://[…@]HOST[:PORT],HOST[:PORT],…                     a cluster that these nodes know

rediss, rediss-sentinel and rediss-cluster: the same over TLS; the server's certificate is verified
against the system's authorities or those in `?ca=FILE`. `?cert=FILE&key=FILE`: our own certificate,
where the server asks for one. `?sentinel_password=…`: where the Sentinels have one of their own.
User and password may be percent-encoded. Does no I/O; messages never repeat a password.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

_REDIS_PORT, _SENTINEL_PORT = 6379, 26379


class BadStoreUrl(ValueError):
    """The message says what is wrong with it."""


class Mode(enum.Enum):
    """How the servers that hold the keys are found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A server: a host and port, or the path of a unix socket (port 0)."""

    host: str
    port: int

    @property
    def is_unix(self) -> bool:
        return self.port == 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.host if self.is_unix else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: authorities to trust (None: the system's), our certificate and its key."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Login:
    """What a new connection says first."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """All that a store's URL says. `addresses`: the server, the Sentinels or some nodes of the cluster."""

    mode: Mode
    addresses: tuple[Address, ...]
    login: Login
    tls: Tls | None = None
    master: str = ""  # its name, for Sentinel
    sentinel_login: Login = Login()

    def __str__(self) -> str:
        """Servers and mode, without secrets: fit for logs."""
        hosts = ",".join(map(str, self.addresses))
        kind = f"{self.mode.value} " if self.mode is not Mode.SINGLE else ""
        master = f" master {self.master}" if self.master else ""
        return f"{kind}{hosts}{master}{' (TLS)' if self.tls else ''}"


_SCHEMES = {
    "redis": (Mode.SINGLE, False),
    "rediss": (Mode.SINGLE, True),
    "unix": (Mode.SINGLE, False),
    "redis-sentinel": (Mode.SENTINEL, False),
    "rediss-sentinel": (Mode.SENTINEL, True),
    "redis-cluster": (Mode.CLUSTER, False),
    "rediss-cluster": (Mode.CLUSTER, True),
}
SCHEMES = tuple(_SCHEMES)


def parse(url: str) -> StoreUrl:
    """Raises BadStoreUrl."""
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in _SCHEMES:
        raise BadStoreUrl("a store's URL begins with " + ", ".join(f"{name}://" for name in SCHEMES))
    mode, is_encrypted = _SCHEMES[scheme]
    rest, _, query_text = rest.partition("?")
    userinfo, at, place = rest.rpartition("@")
    user, _, secret = userinfo.partition(":")
    password = unquote(secret) if at and secret else None
    query = _query(query_text, mode, is_unix=scheme == "unix", is_encrypted=is_encrypted)
    hosts, _, path = place.partition("/")
    if scheme == "unix":
        if hosts or not path:
            raise BadStoreUrl("unix:// is followed by the absolute path of a socket")
        addresses: tuple[Address, ...] = (Address("/" + unquote(path), 0),)
        db, master = query.get("db", ""), ""
    else:
        port = _SENTINEL_PORT if mode is Mode.SENTINEL else _REDIS_PORT
        addresses = tuple(_address(host, port) for host in hosts.split(","))
        master, _, db = path.partition("/") if mode is Mode.SENTINEL else ("", "", path)
    if mode is Mode.SENTINEL and not master:
        raise BadStoreUrl("the URL of Sentinels ends with the name of their master: …/NAME")
    if mode is Mode.SINGLE and len(addresses) > 1:
        raise BadStoreUrl("several servers: say redis-cluster:// or redis-sentinel://")
    return StoreUrl(
        mode=mode,
        addresses=addresses,
        login=Login(unquote(user) or None, password, _db(db, mode)),
        tls=_tls(query) if is_encrypted else None,
        master=unquote(master),
        sentinel_login=Login(password=query.get("sentinel_password")),
    )


def _query(text: str, mode: Mode, *, is_unix: bool, is_encrypted: bool) -> dict[str, str]:
    known = set()
    if is_encrypted:
        known |= {"ca", "cert", "key"}
    if mode is Mode.SENTINEL:
        known |= {"sentinel_password"}
    if is_unix:
        known |= {"db"}
    query = dict(parse_qsl(text, keep_blank_values=True))
    if unknown := sorted(query.keys() - known):
        hint = "; certificates need rediss" if "ca" in unknown else ""
        raise BadStoreUrl(f"this URL takes no {', '.join(unknown)}{hint}")
    return query


def _tls(query: dict[str, str]) -> Tls:
    if ("cert" in query) != ("key" in query):
        raise BadStoreUrl("cert and key go together")
    return Tls(query.get("ca"), query.get("cert"), query.get("key"))


def _address(text: str, default_port: int) -> Address:
    if text.startswith("["):
        host, bracket, tail = text[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise BadStoreUrl("an IPv6 address stands in brackets: [::1]:6379")
        port = tail[1:]
    else:
        host, _, port = text.partition(":")
    if not host:
        raise BadStoreUrl("a host is missing")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadStoreUrl(
            "a port is a number from 1 to 65535; percent-encode the special signs of a password"
        )
    return Address(host, int(port) if port else default_port)


def _db(text: str, mode: Mode) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise BadStoreUrl("the database is a number: …/0")
    if mode is Mode.CLUSTER and int(text):
        raise BadStoreUrl("a cluster has no databases but 0")
    return int(text)
