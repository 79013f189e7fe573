"""The value of a block: what is stored comes back; whatever else lies there does not, and says why."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.kvblock import KvBlock
from antiphon.kv import codec
from antiphon.kv.codec import CHECKS, OVERHEAD_BYTES, BadValue, BadValueReason, BlockCodec, verify
from antiphon.kv.keys import BlockKey, parse_block_key, scope_tag
from antiphon.kv.mackeys import MacKeys
from support.kvvalues import (
    CURRENT,
    HEADER_BYTES,
    KEYS,
    NAMESPACE,
    OTHER_NAMESPACE,
    OTHER_SCOPE,
    PREVIOUS,
    UNKNOWN,
    forge,
    header_of,
    make_block,
)

CODEC = BlockCodec(NAMESPACE, KEYS)
BLOCK = make_block(range(32))
PAYLOAD = bytes(range(64))
VALUE = CODEC.encode(BLOCK, PAYLOAD)
KEY = BlockKey(NAMESPACE, scope_tag(BLOCK.scope), BLOCK.hash)

# For each field that is compared: the same field of a value that is right in every other respect.
LIES: dict[str, object] = {
    "magic": b"ANTIPHKW",
    "version": 2,
    "codec": 1,
    "namespace": OTHER_NAMESPACE,
    "scope_tag": scope_tag(OTHER_SCOPE),
    "hash": make_block(range(32), before=b"other history").hash,
    "rank": 1,
    "num_tokens": 31,
    "first_position": 0,
    "token_digest": header_of(CODEC.encode(make_block(range(1, 33)), b"")).token_digest,
}
OF_TOKENS = {"num_tokens", "first_position", "token_digest"}


def refused(value: bytes | memoryview, block: KvBlock = BLOCK, rank: int = 0) -> BadValueReason:
    """Why this value is not the block's."""
    with pytest.raises(BadValue) as caught:
        CODEC.decode(block, value, rank)
    return caught.value.reason


def test_the_format_stays_what_it_is() -> None:
    """Every byte of one value. Another form needs another version: workers of two ages share a store."""
    value = BlockCodec(b"namespc1", MacKeys(CURRENT)).encode(
        KvBlock(bytes(range(32, 64)), 5, (0, 1, 49151, 2**32 - 1), b"tenant"), b"the payload", rank=2
    )
    assert value.hex() == (
        "414e544950484b56"  # magic
        "0100"  # version
        "0000"  # codec
        "6e616d6573706331"  # namespace
        "c0bff42a"  # scope tag
        "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"  # hash
        "02000000"  # rank
        "04000000"  # tokens
        "14000000"  # first position
        "49e47ee6442b0184a47d0ff559b4b3d820ff955f9014e721d35fc54e69fd8351"  # token digest
        "5621af5e"  # key id
        "0b00000000000000"  # payload length
        "746865207061796c6f6164"  # payload
        "1877745012c0a867b071faaadfe10434e11b0df0108855ed6d32b4174d991846"  # MAC
    )


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300),
    index=st.integers(0, 10**6),
    payload=st.binary(max_size=3000),
    rank=st.integers(0, 2**32 - 1),
)
def test_what_is_stored_comes_back(ids: list[int], index: int, payload: bytes, rank: int) -> None:
    """Any tokens, any payload, any rank, at any place."""
    block = KvBlock(BLOCK.hash, index, tuple(ids), BLOCK.scope)
    value = CODEC.encode(block, payload, rank)
    assert len(value) == len(payload) + OVERHEAD_BYTES
    assert CODEC.decode(block, value, rank) == payload
    assert CODEC.decode(block, memoryview(value), rank) == payload
    assert verify(BlockKey(NAMESPACE, KEY.scope_tag, KEY.hash, rank), value, KEYS).rank == rank


def test_nothing_is_copied_on_the_way_out_and_once_on_the_way_in() -> None:
    """Values are megabytes, and another worker's steps want the memory's bandwidth."""
    payload = bytes(4 << 20)
    tracemalloc.start()
    try:
        value = CODEC.encode(BLOCK, payload)
        encode_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        found = CODEC.decode(BLOCK, value)
        decode_peak = tracemalloc.get_traced_memory()[1] - encode_peak
    finally:
        tracemalloc.stop()
    assert len(payload) < encode_peak < 1.01 * len(payload)
    assert decode_peak < 10_000
    assert found.obj is value


def test_a_payload_cannot_be_written_through() -> None:
    """The view is read-only even where the value is not."""
    assert CODEC.decode(BLOCK, memoryview(bytearray(VALUE))).readonly


def test_a_payload_begins_where_arrays_like_it() -> None:
    """The header is a multiple of 16 bytes: wide loads of the engine's copies stay aligned."""
    assert HEADER_BYTES % 16 == 0


@pytest.mark.parametrize(("field", "reason"), CHECKS, ids=[field for field, _ in CHECKS])
def test_this_check_alone_stands_in_the_way(
    field: str, reason: BadValueReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value, well signed, that is wrong in this field only: refused, and let through without the check."""
    value = forge(header_of(VALUE)._replace(**{field: LIES[field]}), PAYLOAD)
    assert refused(value) is reason
    monkeypatch.setattr(codec, "CHECKS", tuple(check for check in CHECKS if check[0] != field))
    assert CODEC.decode(BLOCK, value) == PAYLOAD


@pytest.mark.parametrize("change", [-1, 1, -len(PAYLOAD), 2**40, 2**64 - 1 - len(PAYLOAD)])
def test_the_length_check_alone_stands_in_the_way(change: int) -> None:
    """A well signed value that announces another payload length than it has."""
    header = header_of(VALUE)
    value = forge(header._replace(payload_bytes=header.payload_bytes + change), PAYLOAD)
    assert refused(value) is BadValueReason.LENGTH


@pytest.mark.parametrize("payload", [PAYLOAD[:-1], PAYLOAD + b"\0", b""], ids=["shorter", "longer", "none"])
def test_a_payload_of_another_length_is_refused(payload: bytes) -> None:
    """Truncated or extended by someone with the key: still not what its header announces."""
    assert refused(forge(header_of(VALUE), payload)) is BadValueReason.LENGTH


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, OVERHEAD_BYTES - 1])
def test_a_value_too_short_to_be_read_is_refused(size: int) -> None:
    """Before its header is looked at."""
    assert refused(VALUE[:size]) is BadValueReason.LENGTH


def test_the_key_check_alone_stands_in_the_way() -> None:
    """Well signed with a key that is not ours, and says so."""
    value = forge(header_of(VALUE)._replace(key_id=UNKNOWN.id), PAYLOAD, UNKNOWN)
    assert refused(value) is BadValueReason.KEY
    assert BlockCodec(NAMESPACE, MacKeys(CURRENT, UNKNOWN)).decode(BLOCK, value) == PAYLOAD


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize(
    "at", [HEADER_BYTES, HEADER_BYTES + 31, len(VALUE) - 33, len(VALUE) - 32, len(VALUE) - 1]
)
def test_the_mac_check_alone_stands_in_the_way_of_a_flipped_bit(at: int, bit: int) -> None:
    """One bit of the payload or of the MAC: llama.cpp would take it."""
    value = bytearray(VALUE)
    value[at] ^= 1 << bit
    assert refused(memoryview(value)) is BadValueReason.MAC


def test_the_mac_check_alone_stands_in_the_way_of_a_forger() -> None:
    """Signed with another key under the number of ours; with our other key; or not at all."""
    header = header_of(VALUE)
    assert refused(forge(header, PAYLOAD, UNKNOWN)) is BadValueReason.MAC
    assert refused(forge(header, PAYLOAD, PREVIOUS)) is BadValueReason.MAC
    assert refused(VALUE[:-32] + bytes(32)) is BadValueReason.MAC


def test_the_key_before_is_believed_until_it_is_forgotten() -> None:
    """A value outlives one rotation, not two; new values are signed with the new key."""
    old = BlockCodec(NAMESPACE, MacKeys(PREVIOUS)).encode(BLOCK, PAYLOAD)
    assert CODEC.decode(BLOCK, old) == PAYLOAD
    with pytest.raises(BadValue, match="bad key"):
        BlockCodec(NAMESPACE, MacKeys(UNKNOWN, CURRENT)).decode(BLOCK, old)
    with pytest.raises(BadValue, match="bad old_key"):
        BlockCodec(NAMESPACE, MacKeys(UNKNOWN, CURRENT, (PREVIOUS.id,))).decode(BLOCK, old)
    assert header_of(CODEC.encode(BLOCK, PAYLOAD)).key_id == CURRENT.id


def test_two_tenants_cannot_read_each_others_values() -> None:
    """The same tokens at the same place under another scope: refused before the MAC is."""
    assert refused(VALUE, make_block(range(32), scope=OTHER_SCOPE)) is BadValueReason.SCOPE


@pytest.mark.parametrize(("field", "reason"), CHECKS, ids=[field for field, _ in CHECKS])
def test_an_inspection_checks_all_but_the_tokens(field: str, reason: BadValueReason) -> None:
    """`verify` knows the key only; what the key cannot say is not asked."""
    value = forge(header_of(VALUE)._replace(**{field: LIES[field]}), PAYLOAD)
    if field in OF_TOKENS:
        assert verify(KEY, value, KEYS) == header_of(value)
        return
    with pytest.raises(BadValue) as caught:
        verify(KEY, value, KEYS)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (VALUE[:-1], BadValueReason.LENGTH),
        (VALUE[:50], BadValueReason.LENGTH),
        (VALUE[:-1] + bytes([VALUE[-1] ^ 1]), BadValueReason.MAC),
        (forge(header_of(VALUE)._replace(key_id=UNKNOWN.id), PAYLOAD, UNKNOWN), BadValueReason.KEY),
    ],
    ids=["truncated", "short", "flipped", "strange-key"],
)
def test_an_inspection_checks_length_key_and_mac(value: bytes, reason: BadValueReason) -> None:
    """As reading does."""
    with pytest.raises(BadValue) as caught:
        verify(KEY, value, KEYS)
    assert caught.value.reason is reason


@pytest.mark.parametrize("rank", [None, 0, 5])
def test_a_value_fits_its_own_key(rank: int | None) -> None:
    """What lies under the key that the codec names can be inspected with nothing but that key."""
    key = parse_block_key(CODEC.key(BLOCK, rank))
    assert key is not None
    assert verify(key, CODEC.encode(BLOCK, PAYLOAD, rank or 0), KEYS).hash == BLOCK.hash


def test_a_namespace_has_its_length() -> None:
    """A short one would be padded by the header and meet another's."""
    with pytest.raises(ValueError, match="8 bytes"):
        BlockCodec(b"short", KEYS)
