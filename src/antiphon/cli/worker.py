"""`antiphon worker`: one worker process; gateways are told its address, or find it by its lease."""

from __future__ import annotations

import argparse
import os
from urllib.parse import urlsplit

from antiphon.cli import kvoptions, options
from antiphon.cli.checks import read_available_memory
from antiphon.cli.models import find_own_model
from antiphon.cli.process import Reporter, run_process
from antiphon.core.errors import BadRequest
from antiphon.core.generation import Role
from antiphon.obs.log import configure_logging
from antiphon.router.link import link_url
from antiphon.worker.build import EngineSize
from antiphon.worker.lease import LeaseSettings
from antiphon.worker.main import WorkerSettings, run_worker
from antiphon.worker.weightcache import cache_folder

_PORT = 8100
_EVERY_HOST = ("0.0.0.0", "::", "")
_HERE = ("127.0.0.1", "::1", "localhost")
_MAX_ADDRESS = 512


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon worker",
        description="Run one worker: a model, its engine and one port for gateways, /healthz and /metrics.",
        epilog="examples:\n  openssl rand -hex 32 > secret\n"
        "  antiphon worker --model smollm2 --port 8100 --secret-file secret\n"
        "  antiphon worker --host 10.0.0.7 --secret-file secret --control-redis redis://control:6379",
    )
    options.add_model_options(made)
    made.add_argument("--name", default="worker", help="what logs and metrics call it")
    made.add_argument(
        "--role",
        choices=list(Role),
        type=Role,
        default=Role.BOTH,
        help="prefill: compute long prompts for others to answer; decode: answer (default: %(default)s)",
    )
    options.add_listen_options(made, _PORT)
    options.add_tls_options(made)
    options.add_engine_options(made)
    made.add_argument(
        "--redis",
        type=kvoptions.store_url(kvoptions.NONE),
        metavar="URL|none",
        help=f"store that workers share KV blocks through (default: ${kvoptions.REDIS_VARIABLE}, else none)",
    )
    kvoptions.add_key_file_option(made)
    kvoptions.add_control_option(made)
    made.add_argument(
        "--advertise",
        metavar="URL",
        help="where gateways reach this worker: http(s)://HOST:PORT (default: --host and --port)",
    )
    kvoptions.add_cache_options(made)
    options.add_process_options(made)
    return made


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises BadRequest; EngineFault when the engine died."""
    lease = _lease(args)
    settings = WorkerSettings(
        entry=find_own_model(args.model, args.catalogue, args.context),
        secret=options.read_secret(args.secret_file),
        name=args.name,
        host=args.host,
        port=args.port,
        weights=args.weights,
        weights_folder=cache_folder(os.environ),
        size=EngineSize(max_sequences=args.max_sequences, kv_tokens=args.kv_tokens, threads=args.threads),
        kv=kvoptions.kv_settings(args, os.environ, read_available_memory()),
        role=args.role,
        lease=lease,
        tls=options.certificate_files(args),
    )
    has_tls = settings.tls is not None
    reporter = Reporter("worker", args.host, supervised=args.supervised, has_tls=has_tls)
    log = configure_logging(level=args.log_level).bind(worker=args.name)
    if lease is not None and _is_out_of_reach(lease, args.host):
        log.warning("lease.only_here", advice="gateways elsewhere need --host or --advertise")
    main = run_worker(settings, reporter.ready, reporter.progress, log)
    return run_process(main, args.host, args.port, supervised=args.supervised)


def _lease(args: argparse.Namespace) -> LeaseSettings | None:
    """How gateways find this worker. Raises BadRequest where none could reach it."""
    url = kvoptions.control_url(args.control_redis, os.environ)
    if args.advertise is not None:
        link_url(args.advertise)
        if len(args.advertise) > _MAX_ADDRESS:
            raise BadRequest(f"--advertise: an address has at most {_MAX_ADDRESS} characters")
    elif url is not None and args.host in _EVERY_HOST:
        raise BadRequest(
            f"--host {args.host or repr('')} says where to listen, not where gateways reach this worker: "
            "add --advertise http://HOST:PORT"
        )
    return None if url is None else LeaseSettings(url, args.advertise)


def _is_out_of_reach(lease: LeaseSettings, host: str) -> bool:
    """Whether the lease lies where other machines see it, with an address that they cannot use."""
    advertised = urlsplit(lease.advertise).hostname if lease.advertise is not None else host
    places = lease.url.addresses
    return advertised in _HERE and not any(place.is_unix or place.host in _HERE for place in places)
