"""Options about the KV tiers and the two Redis servers that commands share, and what they come to here.

A server's URL may hold a password, and everybody on a machine may read command lines: where no option
is given it comes from $ANTIPHON_REDIS_URL and $ANTIPHON_CONTROL_REDIS_URL, and `antiphon serve` hands
them to its processes that way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from antiphon.cli.options import whole
from antiphon.cli.state import state_folder
from antiphon.core.errors import BadRequest
from antiphon.kv import mackeys, redisurl
from antiphon.worker.kvsettings import CHECKPOINT_BLOCKS, KV_TYPES, KvSettings

REDIS_VARIABLE = "ANTIPHON_REDIS_URL"
CONTROL_VARIABLE = "ANTIPHON_CONTROL_REDIS_URL"
AUTO, NONE = "auto", "none"
_KEY_FILE = "kv-mac-keys"
_MIB = 2**20
_HOST_MOST_BYTES, _HOST_SHARE = 1024 * _MIB, 8
_REDIS_MOST_BYTES, _REDIS_LEAST_BYTES, _REDIS_SHARE = 4096 * _MIB, 64 * _MIB, 4


def store_url(*words: str) -> Callable[[str], str]:
    """An argparse type: a store's URL or one of `words`. Its error does not repeat what was said."""

    def parse(text: str) -> str:
        try:
            if text not in words:
                redisurl.parse(text)
        except redisurl.BadStoreUrl as error:
            hint = f" (or say {' or '.join(words)})" if words else ""
            raise argparse.ArgumentTypeError(f"{error}{hint}") from error
        return text

    return parse


def add_serve_store_option(parser: argparse.ArgumentParser) -> None:
    """The store of `antiphon serve`."""
    parser.add_argument(
        "--redis",
        type=store_url(AUTO, NONE),
        metavar="auto|URL|none",
        help="store that workers share KV blocks through; auto: a Redis of our own, where a server is "
        f"installed (default: ${REDIS_VARIABLE}, else auto)",
    )


def add_control_option(parser: argparse.ArgumentParser, *, default: str = NONE) -> None:
    """The Redis in which workers have their leases."""
    starts = "; auto: a small one of our own, where a server is installed" if default == AUTO else ""
    parser.add_argument(
        "--control-redis",
        type=store_url(*dict.fromkeys((default, NONE))),
        metavar="auto|URL|none" if default == AUTO else "URL|none",
        help="Redis by which gateways find workers, another one than that of KV blocks"
        f"{starts} (default: ${CONTROL_VARIABLE}, else {default})",
    )


def chosen_control(option: str | None, environ: Mapping[str, str], default: str) -> str:
    """What was said, else what the environment says, else the default. Raises BadRequest."""
    return _chosen(option, environ, CONTROL_VARIABLE, default)


def control_url(option: str | None, environ: Mapping[str, str]) -> redisurl.StoreUrl | None:
    """The control Redis of a gateway or a worker; None where there is none. Raises BadRequest."""
    choice = chosen_control(option, environ, NONE)
    return None if choice == NONE else redisurl.parse(choice)


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """How a worker keeps KV."""
    parser.add_argument(
        "--kv-type",
        choices=KV_TYPES,
        default=KV_TYPES[0],
        help="how KV is kept, in the engine and behind it; smaller types cost some quality",
    )
    parser.add_argument(
        "--kv-host-mib",
        type=whole(0, 2**24),
        metavar="N",
        help="memory of a worker for KV blocks beside the engine's; 0: none "
        "(default: at most 1024, less where memory is short)",
    )
    parser.add_argument(
        "--checkpoint-blocks",
        type=whole(1, 2**16),
        default=CHECKPOINT_BLOCKS,
        metavar="N",
        help="blocks of an answer after which its KV is saved while it goes on",
    )


def add_key_file_option(parser: argparse.ArgumentParser) -> None:
    """The keys of the blocks' MAC."""
    parser.add_argument(
        "--kv-key-file",
        type=Path,
        metavar="FILE",
        help="keys that authenticate KV blocks, the same for all workers of a store; made where missing "
        "(default: in the state folder)",
    )


def cache_arguments(args: argparse.Namespace, num_workers: int, available_bytes: int | None) -> list[str]:
    """The cache options as a command line again, for each of so many workers on this machine."""
    host_mib = host_bytes(args.kv_host_mib, num_workers, available_bytes) // _MIB
    return [
        *("--kv-type", args.kv_type),
        *("--kv-host-mib", str(host_mib)),
        *("--checkpoint-blocks", str(args.checkpoint_blocks)),
    ]


def kv_settings(
    args: argparse.Namespace, environ: Mapping[str, str], available_bytes: int | None
) -> KvSettings:
    """A worker's settings. Raises BadRequest."""
    store = chosen_store(args.redis, environ, NONE)
    return KvSettings(
        store_url=None if store == NONE else store,
        key_file=None if store == NONE else key_file(args.kv_key_file, environ),
        host_bytes=host_bytes(args.kv_host_mib, 1, available_bytes),
        kv_type=args.kv_type,
        checkpoint_blocks=args.checkpoint_blocks,
    )


def chosen_store(option: str | None, environ: Mapping[str, str], default: str) -> str:
    """What was said, else what the environment says, else the default. Raises BadRequest."""
    return _chosen(option, environ, REDIS_VARIABLE, default)


def _chosen(option: str | None, environ: Mapping[str, str], variable: str, default: str) -> str:
    if option is not None:
        return option
    try:
        return store_url(NONE, default)(environ.get(variable) or default)
    except argparse.ArgumentTypeError as error:
        raise BadRequest(f"${variable}: {error}") from error


def key_file(option: Path | None, environ: Mapping[str, str]) -> Path:
    """The file with the MAC keys, which is there and sound. Raises BadRequest."""
    file = option if option is not None else state_folder(environ) / _KEY_FILE
    try:
        mackeys.load_or_create(file)
    except mackeys.MacKeyError as error:
        raise BadRequest(str(error)) from error
    return file


def host_bytes(mib: int | None, num_workers: int, available_bytes: int | None) -> int:
    """The host tier of one of `num_workers`: as said, else a share of the memory that is free."""
    if mib is not None:
        return mib * _MIB
    if available_bytes is None:
        return _HOST_MOST_BYTES // num_workers
    return min(_HOST_MOST_BYTES, available_bytes // (_HOST_SHARE * num_workers))


def redis_bytes(mib: int | None, available_bytes: int | None) -> int:
    """The memory of a Redis that we start: as said, else a share of what is free."""
    if mib is not None:
        return mib * _MIB
    if available_bytes is None:
        return _REDIS_LEAST_BYTES
    return min(_REDIS_MOST_BYTES, max(_REDIS_LEAST_BYTES, available_bytes // _REDIS_SHARE))
