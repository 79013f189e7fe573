"""The value of a block in the store: header, payload, MAC.

    magic 8 | format version u16 | codec u16 | namespace 8 | scope tag 4 | block hash 32 | rank u32
    number of tokens u32 | first position u32 | token digest 32 | MAC key id 4 | payload length u64
    payload
    keyed BLAKE3 over header and payload, 32

All little endian. What a reader is handed is hostile until proven: the store's server, everyone who
may write to it and every bug between are distrusted. `decode` knows what the header must say and
believes no length or number in it; each field has a check and a reason of its own, and the MAC, which
costs most, comes last. Only then does the caller see the payload, as a view of the value: nothing is
copied. The payload is opaque here; the engine's adapter owns it.

Hashing stays on the calling thread (large inputs without the GIL): the other cores run steps.
"""

from __future__ import annotations

import enum
import hmac
import struct
from typing import NamedTuple

from blake3 import blake3

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import KvBlock
from antiphon.kv.keys import BlockKey, block_key, scope_tag
from antiphon.kv.mackeys import MacKeys
from antiphon.kv.namespace import NAMESPACE_BYTES, VALUE_FORMAT

MAGIC = b"ANTIPHKV"
FORMAT_VERSION = VALUE_FORMAT
RAW = 0  # the only codec so far: the payload as the engine exported it

_HEADER = struct.Struct("<8sHH8s4s32sIII32s4sQ")  # 112 bytes: a payload begins where numpy likes it
_MAC_BYTES = 32
OVERHEAD_BYTES = _HEADER.size + _MAC_BYTES


class BadValueReason(enum.StrEnum):
    """Why a value was refused. A closed set: metrics use it as a label."""

    MAGIC = "magic"
    VERSION = "version"
    CODEC = "codec"
    NAMESPACE = "namespace"
    SCOPE = "scope"
    HASH = "hash"
    RANK = "rank"
    TOKEN_COUNT = "token_count"
    POSITION = "position"
    TOKENS = "tokens"
    LENGTH = "length"  # not header + the payload it announces + MAC
    KEY = "key"  # signed with a key that nobody told us of
    OLD_KEY = "old_key"  # signed with a key that was ours and has retired
    MAC = "mac"


class BadValue(Exception):
    """A value is not what its key promises: count it, compute the block, and delete it.

    Not where the reason is KEY: another worker's keys may be newer than ours.
    """

    def __init__(self, reason: BadValueReason) -> None:
        super().__init__(f"bad {reason.value}")
        self.reason = reason


class Header(NamedTuple):
    """What a value says of itself, in the order of its bytes."""

    magic: bytes
    version: int
    codec: int
    namespace: bytes
    scope_tag: bytes
    hash: BlockHash
    rank: int
    num_tokens: int
    first_position: int
    token_digest: bytes
    key_id: bytes
    payload_bytes: int


# Fields that must be as expected, in the order they are looked at, and the reason where one is not.
# The two others, payload length and key number, are checked against the value and the keys.
CHECKS = (
    ("magic", BadValueReason.MAGIC),
    ("version", BadValueReason.VERSION),
    ("codec", BadValueReason.CODEC),
    ("namespace", BadValueReason.NAMESPACE),
    ("scope_tag", BadValueReason.SCOPE),
    ("hash", BadValueReason.HASH),
    ("rank", BadValueReason.RANK),
    ("num_tokens", BadValueReason.TOKEN_COUNT),
    ("first_position", BadValueReason.POSITION),
    ("token_digest", BadValueReason.TOKENS),
)


class BlockCodec:
    """Makes and checks the values of one namespace. Immutable: any thread may use it."""

    def __init__(self, namespace: bytes, keys: MacKeys) -> None:
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
        self._namespace = namespace
        self._keys = keys

    def key(self, block: KvBlock, rank: int | None = None) -> str:
        """Where the value of `block` lies in the store."""
        return block_key(self._namespace, scope_tag(block.scope), block.hash, rank)

    def encode(self, block: KvBlock, payload: bytes | memoryview, rank: int = 0) -> bytes:
        """The value to store. The payload is copied once, into the value."""
        key = self._keys.current
        header = _HEADER.pack(*self._header(block, rank, key.id, len(payload)))
        mac = blake3(header, key=key.mac).update(payload).digest()
        return b"".join((header, payload, mac))

    def decode(self, block: KvBlock, value: bytes | memoryview, rank: int = 0) -> memoryview:
        """The payload of `block`, proven, as a read-only view of `value`, which must not change later.

        Raises BadValue.
        """
        header = _read_header(value)
        expected = self._header(block, rank, header.key_id, header.payload_bytes)
        return _proven(value, header, expected, self._keys)

    def _header(self, block: KvBlock, rank: int, key_id: bytes, payload_bytes: int) -> Header:
        ids = block.token_ids
        return Header(
            magic=MAGIC,
            version=FORMAT_VERSION,
            codec=RAW,
            namespace=self._namespace,
            scope_tag=scope_tag(block.scope),
            hash=block.hash,
            rank=rank,
            num_tokens=len(ids),
            first_position=block.index * len(ids),
            token_digest=blake3(struct.pack(f"<{len(ids)}I", *ids)).digest(),
            key_id=key_id,
            payload_bytes=payload_bytes,
        )


def verify(key: BlockKey, value: bytes | memoryview, keys: MacKeys) -> Header:
    """Check a value whose tokens are not known against the key it lay under. Raises BadValue.

    For inspection only: without the tokens nothing says that the block is the one wanted.
    """
    header = _read_header(value)
    expected = header._replace(
        magic=MAGIC,
        version=FORMAT_VERSION,
        codec=RAW,
        namespace=key.namespace,
        scope_tag=key.scope_tag,
        hash=key.hash,
        rank=key.rank or 0,
    )
    _proven(value, header, expected, keys)
    return header


def _read_header(value: bytes | memoryview) -> Header:
    if len(value) < OVERHEAD_BYTES:
        raise BadValue(BadValueReason.LENGTH)
    return Header._make(_HEADER.unpack_from(value))


def _proven(value: bytes | memoryview, header: Header, expected: Header, keys: MacKeys) -> memoryview:
    for name, reason in CHECKS:
        if getattr(header, name) != getattr(expected, name):
            raise BadValue(reason)
    if len(value) != OVERHEAD_BYTES + header.payload_bytes:
        raise BadValue(BadValueReason.LENGTH)
    key = keys.find(header.key_id)
    if key is None:
        raise BadValue(BadValueReason.OLD_KEY if header.key_id in keys.retired else BadValueReason.KEY)
    view = memoryview(value).toreadonly()
    signed, mac = view[:-_MAC_BYTES], view[-_MAC_BYTES:]
    if not hmac.compare_digest(blake3(signed, key=key.mac).digest(), mac):
        raise BadValue(BadValueReason.MAC)
    return signed[_HEADER.size :]
