"""`antiphon kv rotate`: a fresh key for the MAC of the blocks; the one before it is believed for now.

Works on the key file of this machine. Workers read it when they start.
"""

from __future__ import annotations

import argparse
import json
import os

from antiphon.cli import kvoptions
from antiphon.core.errors import BadRequest
from antiphon.kv import mackeys

HELP = "Make a fresh key for the MAC of KV blocks; blocks signed with the one before stay good for now."
EXAMPLE = "  antiphon kv rotate --kv-key-file /etc/antiphon/kv-mac-keys"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action's options."""
    kvoptions.add_key_file_option(parser)


def run(args: argparse.Namespace) -> int:
    """Rotate, and say what is to be done next. Raises BadRequest."""
    file = kvoptions.key_file(args.kv_key_file, os.environ)
    try:
        keys = mackeys.rotate(file)
    except mackeys.MacKeyError as error:
        raise BadRequest(str(error)) from error
    assert keys.previous is not None  # the one that was the current
    if args.json:
        print(json.dumps({"current": keys.current.id.hex(), "previous": keys.previous.id.hex()}))
    else:
        print(
            f"{file}: key {keys.current.id.hex()} signs now, {keys.previous.id.hex()} is still believed. "
            "Restart the workers one by one; rotate again only when the blocks of before have expired."
        )
    return 0
