"""`antiphon gateway`: one gateway process in front of workers that run already."""

from __future__ import annotations

import argparse
import os

from antiphon.cli import database, options
from antiphon.cli.models import find_model
from antiphon.cli.process import Reporter, run_process
from antiphon.gateway.main import GatewaySettings, run_gateway
from antiphon.obs.log import configure_logging
from antiphon.router.link import link_url


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon gateway",
        description="Run one gateway: OpenAI's API in front of workers that run already.",
        epilog="example:\n  antiphon gateway --worker http://127.0.0.1:8100 --secret-file secret",
    )
    made.add_argument(
        "--worker",
        action="append",
        required=True,
        metavar="URL",
        help="a worker's address; may stand repeatedly",
    )
    options.add_model_options(made)
    options.add_listen_options(made, options.PORT)
    options.add_proxy_option(made)
    database.add_database_option(made)
    database.add_scope_options(made)
    options.add_process_options(made)
    return made


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises BadRequest."""
    for url in args.worker:
        link_url(url)
    settings = GatewaySettings(
        workers=tuple(args.worker),
        models=(find_model(args.model, args.catalogue, args.context),),
        host=args.host,
        port=args.port,
        secret=options.read_secret(args.secret_file),
        database=database.database_of(args, os.environ),
        scope_secret=database.scope_secret_of(args, os.environ),
        public_systems=database.public_systems_of(args),
        behind_proxy=args.behind_proxy,
    )
    reporter = Reporter("gateway", args.host, supervised=args.supervised)
    log = configure_logging(level=args.log_level)
    main = run_gateway(settings, reporter.ready, log)
    with database.told(settings.database):
        return run_process(main, args.host, args.port, supervised=args.supervised)
