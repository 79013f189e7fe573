"""What the commands' parsers share: one-line errors, value types, the options of a worker.

Owns the form of a command line. Builds no settings: each command turns its arguments into the
settings of its own process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from antiphon.core.cores import usable_cores
from antiphon.core.errors import BadRequest
from antiphon.gateway.cors import check_origin
from antiphon.net.certificate import CertificateFiles, load
from antiphon.router.rivals import PolicyName

DEFAULT_MODEL = "smollm2"
LOOPBACK = "127.0.0.1"
PORT = 8000
MAX_SEQUENCES = 8
_MIN_SECRET_CHARACTERS = 16


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, whose options are never guessed from their beginnings."""

    def __init__(self, prog: str, *, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            usage=usage,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2 and one line."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are some, and examples as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return parse


port = whole(0, 65535)


def reachable(host: str) -> str:
    """An address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}.get(host, host)


def base_url(host: str, port: int, *, has_tls: bool = False) -> str:
    """The URL of a server that listens there, as this machine reaches it."""
    scheme, name = "https" if has_tls else "http", reachable(host)
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def add_listen_options(parser: argparse.ArgumentParser, default_port: int) -> None:
    """Where a process listens."""
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on")
    parser.add_argument("--port", type=port, default=default_port, help="port to listen on; 0: a free one")


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """What the server shows to who connects."""
    parser.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="PEM file: serve HTTPS with this certificate and its chain; read again when it changes",
    )
    parser.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="PEM file with the certificate's key, without a password"
    )


def certificate_files(args: argparse.Namespace) -> CertificateFiles | None:
    """The files asked for; None for plain HTTP. Raises BadRequest."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise BadRequest("--tls-cert and --tls-key go together")
    if args.tls_cert is None:
        return None
    files = CertificateFiles(args.tls_cert, args.tls_key)
    load(files)  # a bad pair is said at once, not after the model was loaded
    return files


def tls_arguments(args: argparse.Namespace) -> list[str]:
    """Those options as a command line again, for a gateway that `serve` starts."""
    return [] if args.tls_cert is None else ["--tls-cert", str(args.tls_cert), "--tls-key", str(args.tls_key)]


def add_proxy_option(parser: argparse.ArgumentParser) -> None:
    """The operator's word on callers without a key."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--behind-proxy",
        action="store_true",
        help="a proxy in front checks who may call: allow a --host that others reach before there are keys",
    )
    group.add_argument(
        "--require-key",
        action="store_true",
        help="nobody may call without a key, on loopback neither: where a proxy on this machine lets all in",
    )


def proxy_arguments(args: argparse.Namespace) -> list[str]:
    """These as a command line again."""
    given = (("--behind-proxy", args.behind_proxy), ("--require-key", args.require_key))
    return [option for option, is_given in given if is_given]


def origin(text: str) -> str:
    """An argparse type: the origin of a web page."""
    try:
        return check_origin(text)
    except BadRequest as error:
        raise argparse.ArgumentTypeError(error.message) from error


def add_cors_option(parser: argparse.ArgumentParser) -> None:
    """Whose web pages may ask."""
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        type=origin,
        metavar="ORIGIN",
        help="pages of this origin (https://HOST[:PORT]; * for all) may read answers; may stand repeatedly",
    )


def cors_arguments(args: argparse.Namespace) -> list[str]:
    """That option as a command line again, for a gateway that `serve` starts."""
    return [part for origin in args.cors_origin for part in ("--cors-origin", origin)]


def add_model_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Which model, or which models."""
    text = "model of the catalogue, or a GGUF file"
    if several:
        parser.add_argument(
            "--model",
            action="append",
            metavar="NAME|PATH.gguf",
            help=f"{text}; may stand repeatedly (default: {DEFAULT_MODEL})",
        )
    else:
        parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME|PATH.gguf", help=text)
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="models.toml whose entries add to the built-in ones"
    )
    parser.add_argument(
        "--context",
        type=whole(64),
        metavar="TOKENS",
        help="most tokens of prompt and answer together (default: what the catalogue says)",
    )


_ENGINE_OPTIONS = ("max_sequences", "kv_tokens", "threads", "weights")


def add_routing_option(parser: argparse.ArgumentParser) -> None:
    """How the gateway chooses among workers."""
    parser.add_argument(
        "--routing",
        choices=[name.value for name in PolicyName],
        default=PolicyName.COST.value,
        help="how a worker is chosen: by least cost (the default), or by a simpler rule, to compare",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How a worker runs its model."""
    parser.add_argument(
        "--max-sequences",
        type=whole(1, 1024),
        default=MAX_SEQUENCES,
        metavar="N",
        help="answers a worker computes at the same time; each holds memory for its context",
    )
    parser.add_argument(
        "--kv-tokens",
        type=whole(64),
        metavar="N",
        help="tokens of KV cache in a worker (default: max-sequences times context)",
    )
    parser.add_argument(
        "--threads",
        type=whole(1, 1024),
        metavar="N",
        help="engine threads of a worker (default: as step times recommend; a worker's share of the cores "
        "where `serve` starts several)",
    )
    parser.add_argument(
        "--weights",
        default="auto",
        metavar="auto|as-is|FORMAT",
        help="auto: the near-lossless format that is fastest here, measured at the first start; "
        "as-is: the file's own",
    )


def engine_arguments(args: argparse.Namespace, num_workers: int) -> list[str]:
    """The engine options as a command line again, for each of the workers that `serve` starts.

    Several of them share the cores: threads of two engines on one core wait for each other in vain
    (docs/adr/0002).
    """
    given = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    if num_workers > 1 and args.threads is None:
        given["threads"] = max(1, usable_cores() // num_workers)
    return [
        part
        for name, value in given.items()
        if value is not None
        for part in ("--" + name.replace("_", "-"), str(value))
    ]


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """What a process of a fleet shares with the others, and how `antiphon serve` runs it."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="file with the secret that gateways and workers share",
    )
    parser.add_argument(
        "--supervised",
        action="store_true",
        help="report events as JSON lines on stdout and stop when stdin closes, as `antiphon serve` wants it",
    )
    add_log_option(parser)


def read_secret(file: Path) -> str:
    """The secret between gateway and worker. Raises BadRequest."""
    try:
        secret = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise BadRequest(f"--secret-file {file}: {reason}") from error
    if len(secret) < _MIN_SECRET_CHARACTERS:
        raise BadRequest(f"--secret-file {file}: a secret has at least {_MIN_SECRET_CHARACTERS} characters")
    return secret


def add_log_option(parser: argparse.ArgumentParser) -> None:
    """How much is logged."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level logged",
    )
