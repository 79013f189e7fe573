"""Blocks, MAC keys and forged values for tests of what lies in the store."""

from __future__ import annotations

from blake3 import blake3

from antiphon.core.blockhash import block_hash, chain_root
from antiphon.core.kvblock import KvBlock
from antiphon.kv import codec
from antiphon.kv.codec import Header
from antiphon.kv.mackeys import MacKey, MacKeys

NAMESPACE = b"namespc1"
OTHER_NAMESPACE = b"namespc2"
SCOPE = b"tenant-one------and-its-rest----"
OTHER_SCOPE = b"tenant-two------and-its-rest----"

CURRENT = MacKey.of(bytes(range(32)))
PREVIOUS = MacKey.of(bytes(range(1, 33)))
UNKNOWN = MacKey.of(bytes(range(2, 34)))
RETIRED = MacKey.of(b"a key from before two rotations.")
KEYS = MacKeys(CURRENT, PREVIOUS, (RETIRED.id,))

HEADER_BYTES = codec.OVERHEAD_BYTES - 32


def make_block(
    ids: range, index: int = 3, scope: bytes = SCOPE, namespace: bytes = NAMESPACE, before: bytes = b""
) -> KvBlock:
    """A block whose hash follows from all of this, as if `before` were the ids of its parents."""
    parent = blake3(chain_root(namespace, scope) + before).digest()
    return KvBlock(block_hash(parent, ids), index, tuple(ids), scope)


def header_of(value: bytes) -> Header:
    """What the value says of itself, unchecked."""
    return Header._make(codec._HEADER.unpack_from(value))


def forge(header: Header, payload: bytes, key: MacKey = CURRENT) -> bytes:
    """A value with this header, well signed: only who holds the key can make it."""
    signed = codec._HEADER.pack(*header) + payload
    return signed + blake3(signed, key=key.mac).digest()
