"""llama.cpp's sequence-state blob, cut into blocks and joined again.

The blob of `llama_state_seq_get_data` for one sequence in a context with `num_streams` streams of a
plain KV cache::

    u32 magic | i32 sequence | u32 num_streams | per stream: u32 num_cells, and where that is not 0:
        per cell {i32 position, u32 1, i32 sequence}
        u32 v_transposed | u32 num_layers
        per layer {i32 type, u64 row_bytes, num_cells rows of K}
        per layer likewise V, or where it is transposed (flash attention off)
                  {i32 type, u32 item_bytes, u32 row_items, row_items columns of num_cells items}

A payload is what the layers hold of one block: K rows of every layer, then V rows of every layer,
never transposed: blocks written with and without flash attention are interchangeable. Joining writes
positions 0 … n-1 in ascending order; that is bit-exact (docs/adr/0001). Knows bytes only: nothing
here calls llama.cpp. Payloads come verified: lengths are checked, content is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Payload: TypeAlias = bytes | memoryview

LAYOUT = "k-rows-v-rows-1"  # of a payload: a new name for every change of it

_LAYER_HEAD_BYTES = 12
_ITEM = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # unsigned, so that no NaN is ever "normalised"
_CELL = np.dtype([("position", "<i4"), ("num_sequences", "<u4"), ("sequence", "<i4")])


class UnknownLayout(ValueError):
    """The blob is not laid out as described above (a recurrent model, M-RoPE …)."""


@dataclass(frozen=True, slots=True)
class BlockCut:
    """Which blocks to cut out."""

    block_tokens: int
    indices: list[int]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a model's KV rows, read off a sample blob."""

    head: bytes  # magic
    num_streams: int
    num_layers: int
    layer_heads: tuple[bytes, ...]  # of K layers, then of V layers
    row_bytes: tuple[int, int]  # K, V
    v_item_bytes: int = 0  # where V is transposed; 0: it is not

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * sum(self.row_bytes)

    @classmethod
    def learn(cls, blob: bytes, num_tokens: int, num_streams: int) -> Self:
        """Read the layout off the blob of a sequence of `num_tokens` tokens. Raises UnknownLayout."""
        words = np.frombuffer(blob[: len(blob) & ~3], "<u4")
        if len(words) < 4 + num_streams or words[2] != num_streams:
            raise UnknownLayout(f"expected {num_streams} streams")
        at = 3
        while at < 3 + num_streams and words[at] == 0:
            at += 1
        if at >= 3 + num_streams or words[at] != num_tokens:
            raise UnknownLayout(f"expected one stream with {num_tokens} cells")
        offset = 4 * (at + 1) + num_tokens * _CELL.itemsize
        v_transposed, num_layers = (int(n) for n in np.frombuffer(blob, "<u4", 2, offset))
        if v_transposed > 1 or not 0 < num_layers < 4096:
            raise UnknownLayout(f"{num_layers} layers")
        offset += 8
        heads: list[bytes] = []
        rows: list[int] = []
        item_bytes = 0
        for layer in range(2 * num_layers):
            head = blob[offset : offset + _LAYER_HEAD_BYTES]
            if v_transposed and layer >= num_layers:
                item_bytes = int.from_bytes(head[4:8], "little")
                rows.append(item_bytes * int.from_bytes(head[8:], "little"))
            else:
                rows.append(int.from_bytes(head[4:], "little"))
            heads.append(head)
            offset += _LAYER_HEAD_BYTES + num_tokens * rows[-1]
        num_streams_after = num_streams - (at - 3) - 1
        if offset + 4 * num_streams_after != len(blob):
            raise UnknownLayout(f"{len(blob)} bytes where {offset + 4 * num_streams_after} were expected")
        if len(set(rows[:num_layers])) != 1 or len(set(rows[num_layers:])) != 1:
            raise UnknownLayout("rows differ between layers")
        return cls(blob[:4], num_streams, num_layers, tuple(heads), (rows[0], rows[num_layers]), item_bytes)

    def split(self, blob: Bytes, num_cells: int, stream: int, cut: BlockCut) -> list[bytes]:
        """Payloads of the blocks at `cut.indices` in the blob of a sequence of `num_cells` tokens."""
        k, v = self._sections(blob, num_cells, stream)
        v_items = self._v_items(v, num_cells)
        payloads: list[bytes] = []
        for index in cut.indices:
            first = index * cut.block_tokens
            k_part = k[:, _rows(index, cut.block_tokens, self.row_bytes[0])]
            v_part = v_items[:, :, first : first + cut.block_tokens].swapaxes(1, 2)
            # Layer by layer, so that what lies in one piece is copied once.
            payloads.append(b"".join([*k_part, *(np.ascontiguousarray(rows).data for rows in v_part)]))
        return payloads

    def join(self, payloads: Sequence[Payload], stream: int, block_tokens: int) -> Bytes:
        """The blob of a sequence in `stream` that holds these blocks. Raises ValueError on a wrong length."""
        num_cells = len(payloads) * block_tokens
        blob = np.empty(self._blob_bytes(num_cells), np.uint8)
        self._write_frame(blob, num_cells, stream)
        k, v = self._sections(blob, num_cells, stream)
        v_items = self._v_items(v, num_cells)
        k_bytes = self.num_layers * block_tokens * self.row_bytes[0]
        for index, payload in enumerate(payloads):
            if len(payload) != block_tokens * self.bytes_per_token:
                expected = block_tokens * self.bytes_per_token
                raise ValueError(f"a payload has {len(payload)} bytes, {expected} expected")
            data = np.frombuffer(payload, np.uint8)
            k[:, _rows(index, block_tokens, self.row_bytes[0])] = data[:k_bytes].reshape(self.num_layers, -1)
            first = index * block_tokens
            rows = data[k_bytes:].view(v_items.dtype).reshape(self.num_layers, block_tokens, -1)
            v_items[:, :, first : first + block_tokens] = rows.swapaxes(1, 2)
        return blob

    def _blob_bytes(self, num_cells: int) -> int:
        frame = 12 + 4 * self.num_streams + num_cells * _CELL.itemsize + 8
        return frame + 2 * self.num_layers * _LAYER_HEAD_BYTES + num_cells * self.bytes_per_token

    def _body_offset(self, num_cells: int, stream: int) -> int:
        return 12 + 4 * (stream + 1) + num_cells * _CELL.itemsize + 8

    def _sections(self, blob: Bytes, num_cells: int, stream: int) -> tuple[Bytes, Bytes]:
        """Views of K and V: one row per layer, each beginning with the layer's head."""
        if len(blob) != self._blob_bytes(num_cells):
            raise UnknownLayout(f"{len(blob)} bytes for {num_cells} cells")
        offset = self._body_offset(num_cells, stream)
        views: list[Bytes] = []
        for row in self.row_bytes:
            width = _LAYER_HEAD_BYTES + num_cells * row
            views.append(blob[offset : offset + self.num_layers * width].reshape(self.num_layers, width))
            offset += self.num_layers * width
        return views[0], views[1]

    def _v_items(self, v: Bytes, num_cells: int) -> NDArray[np.void] | Bytes:
        """V as [layer, item, cell], whichever way it lies: an item is a number, or a byte of a row."""
        body = v[:, _LAYER_HEAD_BYTES:]
        if not self.v_item_bytes:
            return body.reshape(self.num_layers, num_cells, self.row_bytes[1]).swapaxes(1, 2)
        num_items = self.row_bytes[1] // self.v_item_bytes
        items: NDArray[np.void] | Bytes = np.lib.stride_tricks.as_strided(
            body[:, : self.v_item_bytes].view(_ITEM[self.v_item_bytes]),
            (self.num_layers, num_items, num_cells),
            (v.strides[0], num_cells * self.v_item_bytes, self.v_item_bytes),
        )
        return items

    def _write_frame(self, blob: Bytes, num_cells: int, stream: int) -> None:
        head = np.zeros(3 + stream + 1, "<u4")
        head[0] = int.from_bytes(self.head, "little")
        head[2] = self.num_streams
        head[-1] = num_cells
        cells = np.zeros(num_cells, _CELL)
        cells["position"] = np.arange(num_cells)
        cells["num_sequences"] = 1
        tail = np.array([self.v_item_bytes > 0, self.num_layers], "<u4")
        frame = head.tobytes() + cells.tobytes() + tail.tobytes()
        blob[: len(frame)] = np.frombuffer(frame, np.uint8)
        after = 4 * (self.num_streams - stream - 1)
        if after:
            blob[-after:] = 0
        for section, heads in zip(
            self._sections(blob, num_cells, stream),
            (self.layer_heads[: self.num_layers], self.layer_heads[self.num_layers :]),
            strict=True,
        ):
            section[:, :_LAYER_HEAD_BYTES] = np.frombuffer(b"".join(heads), np.uint8).reshape(
                self.num_layers, -1
            )


def _rows(index: int, block_tokens: int, row_bytes: int) -> slice:
    """Where the rows of the `index`-th block lie in a layer's section."""
    start = _LAYER_HEAD_BYTES + index * block_tokens * row_bytes
    return slice(start, start + block_tokens * row_bytes)
