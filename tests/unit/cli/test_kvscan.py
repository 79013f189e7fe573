"""Walking over the blocks in a store."""

from __future__ import annotations

import io
import sys

import pytest

from antiphon.cli.kvscan import scan_blocks
from antiphon.kv.admin import open_admin
from antiphon.kv.keys import block_key, match_blocks, scope_tag
from support.kvvalues import NAMESPACE, SCOPE
from support.redisserver import redis_server


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_blocks_are_found_among_other_keys(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block comes, nothing else does; how far it is stands on a terminal only, and goes again."""
    screen = _Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    tag = scope_tag(SCOPE)
    keys = {block_key(NAMESPACE, tag, bytes([number]) * 32) for number in range(200)}
    with redis_server(unix=True) as server:
        with server.client() as client:
            client.mset(dict.fromkeys([*keys, "antiphon:kv:strange", "other"], b"value"))
        with open_admin(server.url) as admin:
            found = {
                key: block for blocks in scan_blocks(admin, match_blocks()) for key, block in blocks.items()
            }
    assert found.keys() == keys
    assert {(block.namespace, block.scope_tag) for block in found.values()} == {(NAMESPACE, tag)}
    assert ("keys" in screen.getvalue()) == is_terminal
    assert not is_terminal or screen.getvalue().endswith("\x1b[K")
