"""`antiphon serve`: workers and a gateway on this machine, started, watched and stopped together.

Owns the processes, the secret they share (a file only this user can read, gone at the end) and the
order: workers first, then the gateway that is told their addresses; at the end the gateway first, so
that it can finish its answers. The same processes over the same wire as in a fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.cli import options
from antiphon.cli.child import Child, ChildSettings, StartFailed, fetch
from antiphon.cli.console import Console
from antiphon.cli.models import find_model
from antiphon.cli.process import address_error
from antiphon.tokens.modelfile import locate

_ANTIPHON = (sys.executable, "-m", "antiphon.cli.main")
GRACE_S = 20.0  # for a process to stop in order; more than the gateway gives its open answers
_LINK_POLL_S, _LINK_TIMEOUT_S = 0.05, 30.0
_LINK_UP = re.compile(rb"^antiphon_worker_up\{.*\} 1\.0$", re.MULTILINE)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = options.CommandParser(
        "antiphon serve",
        description="Start workers and a gateway; print one line with the URL when they answer.",
        epilog="examples:\n  antiphon serve\n  antiphon serve --model ./my-model.gguf --port 9000",
    )
    options.add_model_options(made)
    made.add_argument("--workers", type=options.whole(1, 64), default=1, metavar="N", help="worker processes")
    options.add_listen_options(made, options.PORT)
    options.add_proxy_option(made)
    options.add_engine_options(made)
    made.add_argument("--json", action="store_true", help="print the ready line as JSON")
    options.add_log_option(made)
    return made


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; 1 when a process could not be started. Raises BadRequest, NotFound."""
    options.require_loopback(args.host, behind_proxy=args.behind_proxy)
    entry = find_model(args.model, args.catalogue, args.context)
    locate(entry)
    _require_free(args.host, args.port)
    console = Console(as_json=args.json)
    with tempfile.TemporaryDirectory(prefix="antiphon-") as folder:
        secret_file = Path(folder) / "secret"
        secret_file.touch(0o600)
        secret_file.write_text(secrets.token_hex(32))
        try:
            asyncio.run(_Serve(args, secret_file, console).run(entry.name))
        except StartFailed as error:
            console.note(f"antiphon serve: {error}")
            return 1
        except asyncio.CancelledError:
            console.note("antiphon serve: stopped")
    return 0


class _Serve:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, secret_file: Path, console: Console) -> None:
        self._args = args
        self._console = console
        self._children: list[Child] = []
        self._common = ["--model", args.model, "--log-level", args.log_level]
        self._common += ["--secret-file", str(secret_file)]
        if args.catalogue is not None:
            self._common += ["--catalogue", str(args.catalogue)]
        if args.context is not None:
            self._common += ["--context", str(args.context)]

    async def run(self, model: str) -> None:
        """Run until cancelled, by a signal; a second one ends the processes at once."""
        self._stop_on_signals()
        workers = [self._worker(f"worker-{number}") for number in range(1, self._args.workers + 1)]
        async with self._running(workers):
            gateway = self._gateway(workers)
            async with self._running([gateway]):
                await self._until_linked(gateway, len(workers))
                self._console.ready(gateway.url, model, len(workers))
                await asyncio.Event().wait()

    def _worker(self, name: str) -> Child:
        engine = options.engine_arguments(self._args)
        return self._child(
            ChildSettings(
                name=name,
                command=[*_ANTIPHON, "worker", *self._common, *engine, "--name", name],
                health_path="/healthz",
                grace_s=GRACE_S,
            )
        )

    def _gateway(self, workers: Sequence[Child]) -> Child:
        urls = [part for worker in workers for part in ("--worker", worker.url)]
        proxy = ["--behind-proxy"] if self._args.behind_proxy else []
        return self._child(
            ChildSettings(
                name="gateway",
                command=[*_ANTIPHON, "gateway", *self._common, *urls, *proxy],
                host=self._args.host,
                port=self._args.port,
                health_path="/health",
                grace_s=GRACE_S,
            )
        )

    def _child(self, settings: ChildSettings) -> Child:
        child = Child(settings, self._console.progress, self._console.note)
        self._children.append(child)
        return child

    @asynccontextmanager
    async def _running(self, children: Sequence[Child]) -> AsyncIterator[None]:
        """Children that are ready inside and have ended outside. Raises StartFailed."""
        tasks = [asyncio.create_task(child.run(), name=child.name) for child in children]
        try:
            await asyncio.gather(*(child.first_ready for child in children))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _until_linked(self, gateway: Child, num_workers: int) -> None:
        """Wait until the gateway has reached its workers: only then does a request find one."""
        deadline = asyncio.get_running_loop().time() + _LINK_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            page = await fetch(self._args.host, gateway.port, "/metrics")
            if page is not None and len(_LINK_UP.findall(page)) == num_workers:
                return
            await asyncio.sleep(_LINK_POLL_S)
        raise StartFailed(f"the gateway did not reach its workers within {_LINK_TIMEOUT_S:g} s")

    def _stop_on_signals(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_stopping = False

        def stop() -> None:
            nonlocal is_stopping
            if is_stopping:
                for child in self._children:
                    child.kill()
                return
            is_stopping = True
            self._console.note("antiphon serve: stopping; once more ends open answers at once")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)


def _require_free(host: str, port: int) -> None:
    """Fail before the model is loaded, not after. Raises BadRequest."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise address_error(error, host, port) from error
