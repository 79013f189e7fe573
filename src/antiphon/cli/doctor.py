"""`antiphon doctor`: checks this machine for `antiphon serve` and says what to do."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from antiphon import __version__
from antiphon.cli import checks, controlchecks, database, databasechecks, kvoptions, options, redischecks
from antiphon.cli.checks import Finding
from antiphon.cli.models import find_model
from antiphon.core.cores import usable_cores


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon doctor",
        description="Check versions, CPU, memory, model, port, database, Redis. Exit code 1 when serving "
        "cannot work.",
        epilog="examples:\n  antiphon doctor --model ./my-model.gguf\n"
        "  antiphon doctor --redis redis://cache:6379",
    )
    options.add_model_options(made)
    made.add_argument("--host", default=options.LOOPBACK, help="address `serve` would listen on")
    made.add_argument("--port", type=options.port, default=options.PORT, help="port `serve` would listen on")
    database.add_database_option(made)
    kvoptions.add_serve_store_option(made)
    kvoptions.add_control_option(made, default=kvoptions.AUTO)
    made.add_argument("--json", action="store_true", help="print the findings as one JSON list")
    return made


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when one is a fail. Raises NotFound, BadRequest."""
    findings = list(_findings(args))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.level:<4}  {finding.subject:<18} {finding.text}")
            if finding.advice:
                print(f"{'':<25}→ {finding.advice}")
    return 1 if checks.worst(findings) == "fail" else 0


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    entry = find_model(args.model, args.catalogue, args.context)
    yield Finding("ok", "antiphon", __version__)
    yield from checks.check_versions()
    yield checks.check_llama(checks.read_text("/proc/cpuinfo"))
    yield checks.check_cores(usable_cores(), checks.read_text(f"{checks.CGROUP}/cpu.max"))
    yield from checks.check_model(entry, options.MAX_SEQUENCES, checks.read_available_memory())
    yield checks.check_port(args.host, args.port)
    yield from databasechecks.check_database(database.database_of(args, os.environ))
    yield from redischecks.check_store(kvoptions.chosen_store(args.redis, os.environ, kvoptions.AUTO))
    choice = kvoptions.chosen_control(args.control_redis, os.environ, kvoptions.AUTO)
    yield from controlchecks.check_control(choice)
