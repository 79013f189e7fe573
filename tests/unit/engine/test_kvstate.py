"""The sequence-state blob: learned, cut and joined, against a blob built here by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.kvstate import BlockCut, KvLayout, UnknownLayout

LAYERS, K_ROW, V_ROW, BLOCK = 3, 8, 6, 4
MAGIC = struct.pack("<I", 0xAF143CD8)


def rows(num_cells: int, row: int, salt: int) -> list[bytes]:
    """Per layer, `num_cells` rows of distinct bytes."""
    rng = np.random.default_rng(salt)
    return [rng.integers(0, 256, num_cells * row, np.uint8).tobytes() for _ in range(LAYERS)]


def blob(num_cells: int, stream: int, num_streams: int, v_item: int = 0) -> bytes:
    """What llama.cpp writes for a sequence in `stream` (see the module's docstring)."""
    out = MAGIC + struct.pack("<iI", 0, num_streams) + b"\0\0\0\0" * stream + struct.pack("<I", num_cells)
    out += b"".join(struct.pack("<iIi", position, 1, 0) for position in range(num_cells))
    out += struct.pack("<II", v_item > 0, LAYERS)
    for layer in rows(num_cells, K_ROW, 1):
        out += struct.pack("<iQ", 1, K_ROW) + layer
    for layer in rows(num_cells, V_ROW, 2):
        if v_item:
            columns = as_array(layer).reshape(num_cells, V_ROW // v_item, v_item).swapaxes(0, 1)
            out += struct.pack("<iII", 2, v_item, V_ROW // v_item) + columns.tobytes()
        else:
            out += struct.pack("<iQ", 2, V_ROW) + layer
    return out + b"\0\0\0\0" * (num_streams - stream - 1)


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@given(
    num_blocks=st.integers(1, 5),
    num_streams=st.integers(1, 4),
    v_item=st.sampled_from([0, 1, 2]),
    data=st.data(),
)
def test_cut_and_joined_is_the_same_blob(
    num_blocks: int, num_streams: int, v_item: int, data: st.DataObject
) -> None:
    """Whatever stream it came from and whatever stream it goes to, V transposed or not."""
    source, target = (data.draw(st.integers(0, num_streams - 1)) for _ in range(2))
    cells = num_blocks * BLOCK
    layout = KvLayout.learn(blob(BLOCK, 0, num_streams, v_item), BLOCK, num_streams)
    cut = BlockCut(BLOCK, list(range(num_blocks)))
    payloads = layout.split(as_array(blob(cells, source, num_streams, v_item)), cells, source, cut)
    assert {len(p) for p in payloads} == {BLOCK * layout.bytes_per_token}
    assert layout.join(payloads, target, BLOCK).tobytes() == blob(cells, target, num_streams, v_item)


@pytest.mark.parametrize("v_item", [1, 2])
def test_blocks_of_both_attentions_are_interchangeable(v_item: int) -> None:
    """A payload is the same bytes whether V lay transposed or not, and fits either context."""
    cells, cut = 3 * BLOCK, BlockCut(BLOCK, [0, 1, 2])
    plain = KvLayout.learn(blob(BLOCK, 0, 2), BLOCK, 2)
    turned = KvLayout.learn(blob(BLOCK, 0, 2, v_item), BLOCK, 2)
    payloads = plain.split(as_array(blob(cells, 1, 2)), cells, 1, cut)
    assert turned.split(as_array(blob(cells, 1, 2, v_item)), cells, 1, cut) == payloads
    assert turned.join(payloads, 0, BLOCK).tobytes() == blob(cells, 0, 2, v_item)


def test_a_partial_last_block_is_left_out() -> None:
    """Cells behind the last full block do not move the others."""
    layout = KvLayout.learn(blob(BLOCK, 0, 2), BLOCK, 2)
    payloads = layout.split(as_array(blob(11, 1, 2)), 11, 1, BlockCut(BLOCK, [1]))
    k = b"".join(layer[BLOCK * K_ROW : 2 * BLOCK * K_ROW] for layer in rows(11, K_ROW, 1))
    v = b"".join(layer[BLOCK * V_ROW : 2 * BLOCK * V_ROW] for layer in rows(11, V_ROW, 2))
    assert payloads == [k + v]


@pytest.mark.parametrize(
    "wrong", [b"", b"\0" * 3, b"\0" * 64, blob(BLOCK, 0, 1)[:-1], blob(BLOCK, 0, 1) + b"\0"]
)
def test_a_blob_of_another_shape_is_refused(wrong: bytes) -> None:
    """A layout we do not know is said so, never read."""
    with pytest.raises(UnknownLayout):
        KvLayout.learn(wrong, BLOCK, 1)


def test_an_unknown_arrangement_is_refused() -> None:
    """A flag with a third value means a layout of another llama.cpp."""
    data = bytearray(blob(BLOCK, 0, 1))
    data[16 + BLOCK * 12] = 2
    with pytest.raises(UnknownLayout, match="layers"):
        KvLayout.learn(bytes(data), BLOCK, 1)


@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_payloads_of_a_wrong_length_never_reach_a_blob(change: int) -> None:
    """The length is checked before any byte is copied."""
    layout = KvLayout.learn(blob(BLOCK, 0, 1), BLOCK, 1)
    with pytest.raises(ValueError, match="bytes"):
        layout.join([b"x" * max(0, BLOCK * layout.bytes_per_token + change)], 0, BLOCK)
