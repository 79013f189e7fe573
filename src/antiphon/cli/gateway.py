"""`antiphon gateway`: one gateway process in front of workers that are named, or found by their leases."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from antiphon.cli import database, kvoptions, options
from antiphon.cli.models import find_model, read_catalogue, routed_models, upstream_keys
from antiphon.cli.patience import add_patience_options, patience_of
from antiphon.cli.process import Reporter, run_process
from antiphon.cli.queue import add_queue_options, queue_of
from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.gateway.main import GatewaySettings, run_gateway
from antiphon.obs.log import configure_logging
from antiphon.router.link import link_url
from antiphon.router.rivals import PolicyName


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon gateway",
        description="Run one gateway: OpenAI's API in front of workers that are named, or found by leases.",
        epilog="examples:\n  antiphon gateway --worker http://127.0.0.1:8100 --secret-file secret\n"
        "  antiphon gateway --secret-file secret --control-redis redis://control:6379",
    )
    made.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL",
        help="a worker's address; may stand repeatedly, beside those found in --control-redis",
    )
    kvoptions.add_control_option(made)
    options.add_model_options(made, several=True)
    options.add_listen_options(made, options.PORT)
    options.add_routing_option(made)
    add_patience_options(made)
    add_queue_options(made)
    options.add_tls_options(made)
    made.add_argument(
        "--worker-ca",
        type=Path,
        metavar="FILE",
        help="PEM file: who vouches for workers at https addresses (default: the system's authorities)",
    )
    options.add_proxy_option(made)
    options.add_cors_option(made)
    database.add_database_option(made)
    database.add_scope_options(made)
    options.add_process_options(made)
    return made


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises BadRequest."""
    for url in args.worker:
        link_url(url)
    control = kvoptions.control_url(args.control_redis, os.environ)
    models = _models(args, has_workers=control is not None or bool(args.worker))
    settings = GatewaySettings(
        workers=tuple(args.worker),
        control=control,
        models=models,
        routes=read_catalogue(args.catalogue).routes,
        upstream_keys=upstream_keys(models, os.environ),
        routing=PolicyName(args.routing),
        patience=patience_of(args),
        request_timeout_s=args.request_timeout,
        queue=queue_of(args),
        host=args.host,
        port=args.port,
        secret=options.read_secret(args.secret_file),
        database=database.database_of(args, os.environ),
        scope_secret=database.scope_secret_of(args, os.environ),
        public_systems=database.public_systems_of(args),
        behind_proxy=args.behind_proxy,
        require_key=args.require_key,
        cors_origins=tuple(args.cors_origin),
        tls=options.certificate_files(args),
        worker_ca=args.worker_ca,
    )
    has_tls = settings.tls is not None
    reporter = Reporter("gateway", args.host, supervised=args.supervised, has_tls=has_tls)
    log = configure_logging(level=args.log_level)
    main = run_gateway(settings, reporter.ready, log)
    with database.told(settings.database):
        return run_process(main, args.host, args.port, supervised=args.supervised)


def _models(args: argparse.Namespace, *, has_workers: bool) -> tuple[ModelEntry, ...]:
    """Those that were named, each once, and the catalogue's routed ones. Raises BadRequest, NotFound."""
    routed = routed_models(read_catalogue(args.catalogue))
    if not has_workers and not any(entry.upstream is not None for entry in routed):
        raise BadRequest(
            "who computes? Name workers with --worker URL, find them with --control-redis URL, or name other "
            "servers in a --catalogue"
        )
    named = args.model or ([options.DEFAULT_MODEL] if has_workers else [])
    found: dict[str, ModelEntry] = {}
    for entry in [*(find_model(model, args.catalogue, args.context) for model in named), *routed]:
        other = found.setdefault(entry.name, entry)
        if msgspec.structs.replace(other, context=entry.context) != entry:
            raise BadRequest(f"--model: there are two models of the name {entry.name!r}")
    return tuple(found.values())
