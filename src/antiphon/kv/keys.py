"""Every key Antiphon has in Redis: what it is called, what it holds, how long, who uses it.

Declared as data, so that docs/redis-keys.md is made from it (`make docs`), and built by the
functions beside it: no other module spells a key. Keys carry hex of fixed length and decimal ranks
only, never text from outside, and no braces (a cluster would read them as a hash tag and put a whole
conversation on one shard).

Two roles, two servers: `kv` evicts and may lose anything; `control` never evicts.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from blake3 import blake3

from antiphon.core.blockhash import HASH_BYTES, BlockHash
from antiphon.core.lease import is_worker_id
from antiphon.core.scope import tenant_part_of
from antiphon.kv.namespace import NAMESPACE_BYTES

SCOPE_TAG_BYTES = 4
PROBE_NONCE_BYTES = 8

_CONTEXT = "antiphon 2026-11-30 kv scope tag v1"
_LIMIT_CONTEXT = "antiphon 2026-12-01 limit key tag v1"
_LIMIT_TAG_BYTES = 16
_PREFIX = "antiphon:kv"
_CONTROL_PREFIX = "antiphon:control"
WORKERS_KEY = f"{_CONTROL_PREFIX}:workers"
GATEWAYS_KEY = f"{_CONTROL_PREFIX}:gateways"
_BLOCK_KEY = re.compile(
    rf"{_PREFIX}:([0-9a-f]{{{2 * NAMESPACE_BYTES}}}):([0-9a-f]{{{2 * SCOPE_TAG_BYTES}}})"
    rf":([0-9a-f]{{{2 * HASH_BYTES}}})(?::(0|[1-9][0-9]{{0,8}}))?",
)


class Role(enum.StrEnum):
    """Which of the two Redis servers holds a key."""

    KV = "kv"
    CONTROL = "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPattern:
    """One kind of key. `<…>` in the pattern stands for a part, `[…]` for one that may be absent."""

    name: str
    role: Role
    type: str  # Redis' own word: string, hash …
    pattern: str
    ttl: str
    writer: str
    readers: str
    about: str


PATTERNS: tuple[KeyPattern, ...] = (
    KeyPattern(
        name="block",
        role=Role.KV,
        type="string",
        pattern=f"{_PREFIX}:<namespace, 16 hex>:<scope tag, 8 hex>:<block hash, 64 hex>[:<rank>]",
        ttl="always set; slides on use; the deeper a block lies in its chain, the shorter",
        writer="worker, behind the answer (SET NX PX)",
        readers="workers of the same namespace (GET, PEXPIRE; DEL where a value is bad); kv commands",
        about="One full KV block: header, payload, MAC (kv/codec.py). The rank is there only where a "
        "model is spread over several.",
    ),
    KeyPattern(
        name="probe",
        role=Role.KV,
        type="string",
        pattern=f"{_PREFIX}:probe:<nonce, 16 hex>",
        ttl="seconds",
        writer="antiphon doctor",
        readers="antiphon doctor",
        about="Noise, to learn what a login may do and how fast the server is. Deleted at once.",
    ),
    KeyPattern(
        name="lease",
        role=Role.CONTROL,
        type="string",
        pattern=f"{_CONTROL_PREFIX}:worker:<worker id, 32 hex>",
        ttl="6 s; renewed every 2 s by the worker",
        writer="that worker (SET PX; DEL when it has drained)",
        readers="gateways, antiphon fleet (GETRANGE, so that a huge value costs nothing; PTTL)",
        about="One worker in one life: address, model, namespace, load, with a MAC by the workers' secret "
        "(core/lease.py).",
    ),
    KeyPattern(
        name="workers",
        role=Role.CONTROL,
        type="set",
        pattern=WORKERS_KEY,
        ttl="a minute after the last worker's last renewal",
        writer="workers (SADD, PEXPIRE; SREM when drained); gateways (SREM of ids whose lease has ended)",
        readers="gateways, antiphon fleet (SRANDMEMBER with a bound)",
        about="The ids that have a lease, or had one: what need not be found by SCAN.",
    ),
    KeyPattern(
        name="gateways",
        role=Role.CONTROL,
        type="hash",
        pattern=GATEWAYS_KEY,
        ttl="a minute after the last gateway's last word",
        writer="gateways, every 2 s (HSET; HDEL of those that are silent for 10 s)",
        readers="gateways (HGETALL): a limit's part where Redis is away is the limit ÷ their number",
        about="Who lives, and when it said so by Redis' clock.",
    ),
    KeyPattern(
        name="limit",
        role=Role.CONTROL,
        type="hash",
        pattern=f"{_CONTROL_PREFIX}:limit:<digest of a key's id, 32 hex>",
        ttl="2 minutes after the last request; 35 days where the key has a budget, an hour and a half for a "
        "client token",
        writer="gateways (HINCRBY, HSET, HSETNX, HDEL, PEXPIRE)",
        readers="gateways (HGETALL)",
        about="What a key or a client token has used: requests and tokens in slots of 5 s, tokens of day and "
        "month, open requests a gateway (kv/limitcounters.py).",
    ),
    KeyPattern(
        name="control probe",
        role=Role.CONTROL,
        type="string, set, hash",
        pattern=f"{_CONTROL_PREFIX}:probe:<nonce, 16 hex>:<kind>",
        ttl="seconds",
        writer="antiphon doctor",
        readers="antiphon doctor",
        about="To learn what a login may do. Deleted at once.",
    ),
)

ACL = {
    Role.KV: "ACL SETUSER NAME on >PASSWORD ~antiphon:kv:* -@all +get +set +pexpire +unlink +ping "
    "+scan +strlen +info (these three are for `antiphon kv` and `antiphon doctor`; "
    "a cluster needs +cluster|slots +asking as well)",
    Role.CONTROL: "ACL SETUSER NAME on >PASSWORD ~antiphon:control:* "
    "-@all +set +getrange +pttl +del +sadd +srem +srandmember +pexpire +hincrby +hset +hsetnx +hdel +hgetall "
    "+time +ping +select "
    "+info (this one is for `antiphon doctor`; a cluster needs +cluster|slots +command +asking as well)",
}
"""What to type so that a login may do what is needed and no more."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A block's key, read back. `rank` None: the model is not spread over ranks."""

    namespace: bytes
    scope_tag: bytes
    hash: BlockHash
    rank: int | None = None


def scope_tag(scope: bytes) -> bytes:
    """`SCOPE_TAG_BYTES` bytes, the same for all scopes of a tenant, by which its keys are found.

    Two tenants may share a tag by chance; their block hashes differ all the same.
    """
    return blake3(tenant_part_of(scope), derive_key_context=_CONTEXT).digest(SCOPE_TAG_BYTES)


def block_key(namespace: bytes, scope_tag: bytes, block_hash: BlockHash, rank: int | None = None) -> str:
    """The key of a block. ValueError where a part has the wrong length."""
    _check("namespace", namespace, NAMESPACE_BYTES)
    _check("scope tag", scope_tag, SCOPE_TAG_BYTES)
    _check("block hash", block_hash, HASH_BYTES)
    key = f"{_PREFIX}:{namespace.hex()}:{scope_tag.hex()}:{block_hash.hex()}"
    return key if rank is None else f"{key}:{rank:d}"


def probe_key(nonce: bytes) -> str:
    """The key of a probe. ValueError where the nonce has the wrong length."""
    _check("nonce", nonce, PROBE_NONCE_BYTES)
    return f"{_PREFIX}:probe:{nonce.hex()}"


def lease_key(worker_id: str) -> str:
    """The key of a worker's lease. ValueError where that is no worker's id."""
    if not is_worker_id(worker_id):
        raise ValueError(f"{worker_id!r} is no worker's id")
    return f"{_CONTROL_PREFIX}:worker:{worker_id}"


def limit_key(meter_id: str) -> str:
    """The key of what a meter has used."""
    tag = blake3(meter_id.encode(), derive_key_context=_LIMIT_CONTEXT).digest(_LIMIT_TAG_BYTES)
    return f"{_CONTROL_PREFIX}:limit:{tag.hex()}"


def control_probe_key(nonce: bytes, kind: str) -> str:
    """The key of a probe of the control Redis. ValueError where the nonce has the wrong length."""
    _check("nonce", nonce, PROBE_NONCE_BYTES)
    return f"{_CONTROL_PREFIX}:probe:{nonce.hex()}:{kind}"


def parse_block_key(key: str) -> BlockKey | None:
    """What `block_key` was given; None for any other key."""
    found = _BLOCK_KEY.fullmatch(key)
    if found is None:
        return None
    namespace, tag, block_hash = (bytes.fromhex(part) for part in found.group(1, 2, 3))
    rank = found.group(4)
    return BlockKey(namespace, tag, block_hash, None if rank is None else int(rank))


def match_blocks(namespace: bytes | None = None, scope_tag: bytes | None = None) -> str:
    """A SCAN pattern for all blocks of a namespace, of a tenant, of both, or for all there are."""
    parts = ((namespace, "namespace", NAMESPACE_BYTES), (scope_tag, "scope tag", SCOPE_TAG_BYTES))
    globs = []
    for value, what, size in parts:
        if value is not None:
            _check(what, value, size)
        globs.append("?" * (2 * size) if value is None else value.hex())
    return ":".join((_PREFIX, *globs, "*"))


def _check(what: str, value: bytes, num_bytes: int) -> None:
    if len(value) != num_bytes:
        raise ValueError(f"a {what} has {num_bytes} bytes, not {len(value)}")
