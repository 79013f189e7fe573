"""Walks over the blocks in a store, telling on a terminal how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from antiphon.kv.admin import StoreAdmin
from antiphon.kv.keys import BlockKey, parse_block_key

_CLEAR_LINE = "\r\x1b[K"


def scan_blocks(admin: StoreAdmin, match: str) -> Iterator[dict[str, BlockKey]]:
    """Blocks by their keys, some at a time; a key may come twice. Raises StoreFault."""
    is_terminal = sys.stderr.isatty()
    num_keys = 0
    try:
        for keys in admin.scan(match):
            num_keys += len(keys)
            if is_terminal:
                sys.stderr.write(f"{_CLEAR_LINE}{num_keys} keys\r")
                sys.stderr.flush()
            blocks = {key: block for key in keys if (block := parse_block_key(key)) is not None}
            if blocks:
                yield blocks
    finally:
        if is_terminal:
            sys.stderr.write(_CLEAR_LINE)
