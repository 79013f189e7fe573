"""A worker's lease: what it says of itself to gateways that have no link to it yet.

Owns the form and its seal. A gateway sends the workers' secret and people's prompts to the address in
a lease, so a lease counts only with a MAC by that very secret: who can write to the Redis in which
leases lie cannot make one, alter one, or put one under another worker's id. (He can withhold one, and
put back one that was true once.) No clock is in it: how long it holds is its keeper's business.

The form: `1 <MAC, 64 hex> <JSON>`, readable in redis-cli.
"""

from __future__ import annotations

import enum
import hmac
import re
import secrets

import msgspec
from blake3 import blake3

from antiphon.core.generation import Load, WorkerInfo

MAX_LEASE_BYTES = 4096
_ID_BYTES = 16
_ID = re.compile(rf"[0-9a-f]{{{2 * _ID_BYTES}}}")
_MAC_CONTEXT = "antiphon 2026-12-01 worker lease MAC v1"
_VERSION = b"1"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, in one life of its process. All but `load` is the same for that life."""

    id: str
    address: str  # as gateways reach it: http://HOST:PORT, or https
    protocol: int  # of core/wire.py
    info: WorkerInfo
    load: Load


class LeaseFault(enum.StrEnum):
    """Why a lease does not count. A closed set: metrics use it as a label."""

    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    FORGED = "forged"  # another secret, another worker's, or altered


class BadLease(Exception):
    """Says nothing of what stands in it: nobody has vouched for that."""

    def __init__(self, fault: LeaseFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


def new_worker_id() -> str:
    """Of one life of a worker: random, so that nothing from outside is in a key."""
    return secrets.token_hex(_ID_BYTES)


def is_worker_id(text: str) -> bool:
    """Whether `new_worker_id` could have made it."""
    return _ID.fullmatch(text) is not None


class LeaseSeal:
    """Signs and checks by the secret that gateways and workers share."""

    def __init__(self, secret: str) -> None:
        self._key = blake3(secret.encode(), derive_key_context=_MAC_CONTEXT).digest()

    def seal(self, lease: Lease) -> bytes:
        """ValueError where it would be longer than is read."""
        body = msgspec.json.encode(lease)
        sealed = b"%s %s %s" % (_VERSION, self._mac(lease.id, body), body)
        if len(sealed) > MAX_LEASE_BYTES:
            raise ValueError(f"a lease has at most {MAX_LEASE_BYTES} bytes, not {len(sealed)}")
        return sealed

    def unseal(self, worker_id: str, sealed: bytes) -> Lease:
        """The lease of this worker. Raises BadLease."""
        if len(sealed) > MAX_LEASE_BYTES:
            raise BadLease(LeaseFault.TOO_LONG)
        version, _, rest = sealed.partition(b" ")
        mac, _, body = rest.partition(b" ")
        if version != _VERSION:
            raise BadLease(LeaseFault.MALFORMED)
        if not hmac.compare_digest(mac, self._mac(worker_id, body)):
            raise BadLease(LeaseFault.FORGED)
        try:
            return msgspec.json.decode(body, type=Lease)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadLease(LeaseFault.MALFORMED) from error

    def _mac(self, worker_id: str, body: bytes) -> bytes:
        return blake3(worker_id.encode() + b" " + body, key=self._key).hexdigest().encode()
