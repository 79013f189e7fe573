"""`antiphon serve`: Redis, workers and a gateway on this machine, started, watched and stopped together.

Owns the processes, the secret they share (a file only this user can read, gone at the end) and the
order: both Redis servers, the workers, then the gateway that is told their addresses; at the end the
gateway first, so that it can finish its answers, and Redis last, so that the workers can save theirs.
The same processes over the same wire as in a fleet. No Redis, or one that does not start, is no
failure: without one for KV blocks each worker keeps its own, without the control Redis there are no
workers but these.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from antiphon.cli import database, kvoptions, options
from antiphon.cli.checks import read_available_memory
from antiphon.cli.child import Child, Program, StartFailed
from antiphon.cli.console import Console
from antiphon.cli.models import find_own_model
from antiphon.cli.patience import add_patience_options, patience_arguments
from antiphon.cli.process import address_error
from antiphon.cli.queue import add_queue_options, queue_arguments
from antiphon.cli.redisserver import NoServer, RedisServer, RedisSettings, find_server
from antiphon.cli.runfolder import RunCard, run_folder
from antiphon.cli.state import state_folder
from antiphon.cli.supervised import ANTIPHON, CommandSettings, SupervisedCommand, fetch
from antiphon.kv.keys import Role
from antiphon.tokens.modelfile import locate

GRACE_S = 20.0  # for a process to stop in order; more than the gateway gives its open answers
_CONTROL_BYTES = 64 * 2**20  # thousands of leases take a few
_WITHOUT = {
    Role.KV: "KV is shared within a worker only",
    Role.CONTROL: "no worker can join this run from outside",
}
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
    options.add_routing_option(made)
    add_patience_options(made)
    add_queue_options(made)
    options.add_tls_options(made)
    options.add_proxy_option(made)
    options.add_cors_option(made)
    database.add_database_option(made)
    database.add_scope_options(made)
    options.add_engine_options(made)
    kvoptions.add_serve_store_option(made)
    made.add_argument(
        "--redis-memory-mib",
        type=options.whole(64, 2**24),
        metavar="N",
        help="memory of the Redis of our own (default: a quarter of what is free, at most 4096)",
    )
    kvoptions.add_control_option(made, default=kvoptions.AUTO)
    kvoptions.add_key_file_option(made)
    kvoptions.add_cache_options(made)
    made.add_argument("--json", action="store_true", help="print the ready line as JSON")
    options.add_log_option(made)
    return made


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; 1 when a process could not be started. Raises BadRequest, NotFound."""
    database.check_gateway(args, os.environ)
    options.certificate_files(args)
    entry = find_own_model(args.model, args.catalogue, args.context)
    locate(entry)
    _require_free(args.host, args.port)
    redis = _Redis(
        store=kvoptions.chosen_store(args.redis, os.environ, kvoptions.AUTO),
        control=kvoptions.chosen_control(args.control_redis, os.environ, kvoptions.AUTO),
    )
    console = Console(as_json=args.json)
    with run_folder(state_folder(os.environ)) as folder:
        try:
            asyncio.run(_Serve(args, folder, console).run(entry.name, redis))
        except StartFailed as error:
            console.note(f"antiphon serve: {error}")
            return 1
        except asyncio.CancelledError:
            console.note("antiphon serve: stopped")
    return 0


@dataclass(frozen=True, slots=True)
class _Redis:
    """The two servers: each a URL, `none`, or `auto` until it was started."""

    store: str
    control: str


class _Serve:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, folder: Path, console: Console) -> None:
        self._args = args
        self._folder = folder
        self._console = console
        self._available_bytes = read_available_memory()
        self._children: list[Child] = []
        self._secret_file = folder / "secret"
        self._secret_file.touch(0o600)
        self._secret_file.write_text(secrets.token_hex(32))
        self._common = ["--model", args.model, "--log-level", args.log_level]
        self._common += ["--secret-file", str(self._secret_file)]
        if args.catalogue is not None:
            self._common += ["--catalogue", str(args.catalogue)]
        if args.context is not None:
            self._common += ["--context", str(args.context)]

    async def run(self, model: str, redis: _Redis) -> None:
        """Run until cancelled, by a signal; a second one ends the processes at once."""
        self._stop_on_signals()
        async with AsyncExitStack() as stack:
            redis = await self._start_redis(redis, stack)
            workers = [self._worker(number, redis) for number in range(1, self._args.workers + 1)]
            await stack.enter_async_context(self._running(workers))
            gateway = self._gateway(workers, redis)
            await stack.enter_async_context(self._running([gateway]))
            await self._until_linked(gateway, len(workers))
            self._leave_card(gateway, workers, redis)
            self._console.ready(gateway.url, model, len(workers))
            await asyncio.Event().wait()

    async def _start_redis(self, redis: _Redis, stack: AsyncExitStack) -> _Redis:
        """Their URLs, or `none`; servers of our own run until the stack unwinds."""
        store, control = redis.store, redis.control
        if store == kvoptions.AUTO:
            memory_bytes = kvoptions.redis_bytes(self._args.redis_memory_mib, self._available_bytes)
            store = await self._start_server(Role.KV, memory_bytes, stack)
        if control == kvoptions.AUTO:
            control = await self._start_server(Role.CONTROL, _CONTROL_BYTES, stack)
        return _Redis(store, control)

    async def _start_server(self, role: Role, memory_bytes: int, stack: AsyncExitStack) -> str:
        try:
            binary = await asyncio.to_thread(find_server, os.environ.get("PATH", os.defpath))
            server = RedisServer(RedisSettings(binary, self._folder, memory_bytes, role))
            await stack.enter_async_context(self._running([server]))
        except (NoServer, StartFailed) as error:
            self._console.note(f"antiphon serve: {_WITHOUT[role]}: {error}")
            return kvoptions.NONE
        return server.url

    def _worker(self, number: int, redis: _Redis) -> SupervisedCommand:
        engine = options.engine_arguments(self._args, self._args.workers)
        cache = kvoptions.cache_arguments(self._args, self._args.workers, self._available_bytes)
        if redis.store != kvoptions.NONE:
            file = kvoptions.key_file(self._args.kv_key_file, os.environ)
            cache += ["--kv-key-file", str(file)]
        name = f"worker-{number}"
        return self._command(
            CommandSettings(
                name=name,
                command=[*ANTIPHON, "worker", *self._common, *engine, *cache, "--name", name],
                environ={
                    kvoptions.REDIS_VARIABLE: redis.store,
                    kvoptions.CONTROL_VARIABLE: redis.control,
                },
                health_path="/healthz",
                grace_s=GRACE_S,
            )
        )

    def _gateway(self, workers: Sequence[SupervisedCommand], redis: _Redis) -> SupervisedCommand:
        urls = [part for worker in workers for part in ("--worker", worker.url)]
        proxy = options.proxy_arguments(self._args)
        pages = [*options.tls_arguments(self._args), *options.cors_arguments(self._args)]
        routing = ["--routing", self._args.routing, *patience_arguments(self._args)]
        routing += queue_arguments(self._args)
        callers = database.gateway_arguments(self._args)
        return self._command(
            CommandSettings(
                name="gateway",
                command=[*ANTIPHON, "gateway", *self._common, *urls, *proxy, *pages, *routing, *callers],
                environ={
                    kvoptions.CONTROL_VARIABLE: redis.control,
                    **database.gateway_environ(self._args, os.environ),
                },
                host=self._args.host,
                port=self._args.port,
                has_tls=self._args.tls_cert is not None,
                health_path="/health",
                grace_s=GRACE_S,
            )
        )

    def _command(self, settings: CommandSettings) -> SupervisedCommand:
        return SupervisedCommand(settings, self._console.progress, self._console.note)

    @asynccontextmanager
    async def _running(self, programs: Sequence[Program]) -> AsyncIterator[None]:
        """Programs that are ready inside and have ended outside. Raises StartFailed."""
        children = [Child(program, self._console.note) for program in programs]
        self._children += children
        tasks = [asyncio.create_task(child.run(), name=child.name) for child in children]
        try:
            await asyncio.gather(*(child.first_ready for child in children))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _leave_card(
        self, gateway: SupervisedCommand, workers: Sequence[SupervisedCommand], redis: _Redis
    ) -> None:
        """Let the other commands find this run."""
        model, args = self._args.model, self._args
        card = RunCard(
            gateway=gateway.url,
            workers=[worker.url for worker in workers],
            secret_file=str(self._secret_file),
            redis=None if redis.store == kvoptions.NONE else redis.store,
            control=None if redis.control == kvoptions.NONE else redis.control,
            model=str(Path(model).expanduser().absolute()) if os.sep in model else model,
            catalogue=_absolute(args.catalogue),
            database=database.said_database(args, os.environ),
            scope_secret_file=_absolute(args.scope_secret_file),
            public_prefix_file=_absolute(args.public_prefix_file),
        )
        card.write(self._folder)

    async def _until_linked(self, gateway: SupervisedCommand, num_workers: int) -> None:
        """Wait until the gateway has reached its workers: only then does a request find one."""
        deadline = asyncio.get_running_loop().time() + _LINK_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            page = await fetch(gateway.url, "/metrics")
            if page is not None and len(_LINK_UP.findall(page)) >= num_workers:
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


def _absolute(file: Path | None) -> str | None:
    return None if file is None else str(file.absolute())


def _require_free(host: str, port: int) -> None:
    """Fail before the model is loaded, not after. Raises BadRequest."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise address_error(error, host, port) from error
