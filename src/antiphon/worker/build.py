"""Builds the engine a catalogue entry asks for. The only place that names the runners."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from antiphon import __version__
from antiphon.core.catalogue import ModelEntry
from antiphon.core.clock import Clock
from antiphon.core.cores import usable_cores
from antiphon.core.generation import Role, WorkerInfo
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.kvtype import KvType
from antiphon.engine.llama import LlamaRunner, LlamaSettings
from antiphon.engine.runner import ModelRunner
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings, StepTimes
from antiphon.kv.namespace import NamespaceParts, namespace_of
from antiphon.worker.kvsettings import KvSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """How much an engine holds and does at once. `kv_tokens` None: every sequence may fill its context."""

    max_sequences: int = 8
    kv_tokens: int | None = None
    token_budget: int = 256
    threads: int | None = None  # None: as many as step times recommend


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The file an engine runs, as the catalogue and the weight tuning decided."""

    entry: ModelEntry
    path: Path | None  # None: scripted
    revision: str  # digest of the weights
    context_tokens: int


def build_engine(model: LoadedModel, size: EngineSize, kv: KvSettings, role: Role, clock: Clock) -> Engine:
    """Load the model and make an engine of it. Slow; raises EngineFault."""
    runner = _scripted(model, size) if model.path is None else _llama(model, model.path, size, kv, clock)
    kv_tokens = size.kv_tokens or size.max_sequences * model.context_tokens
    num_blocks = (
        max(kv_tokens, runner.block_tokens * size.max_sequences) // runner.block_tokens + size.max_sequences
    )
    budget = max(size.token_budget, size.max_sequences)
    settings = EngineSettings(
        num_blocks=num_blocks,
        namespace=namespace_for(model, runner),
        checkpoint_blocks=kv.checkpoint_blocks if kv.is_used else None,
        offers_early=role is Role.PREFILL,
        token_budget=budget,
    )
    return Engine(runner, settings, clock)


def describe(name: str, role: Role, model: LoadedModel, engine: Engine) -> WorkerInfo:
    """What the worker says of itself to gateways."""
    runner = engine.runner
    return WorkerInfo(
        worker=name,
        model=model.entry.name,
        revision=model.revision,
        namespace=namespace_for(model, runner).hex(),
        engine=model.entry.engine,
        version=__version__,
        context_tokens=runner.context_tokens,
        block_tokens=runner.block_tokens,
        num_blocks=engine.num_blocks,
        max_sequences=runner.max_sequences,
        role=role,
    )


def thread_counts(threads: int | None) -> tuple[int, ...]:
    """Thread counts a step may use: the one given, or some up to the cores this process may use."""
    if threads is not None:
        return (threads,)
    cores = usable_cores()
    return tuple(sorted({1, max(1, cores // 2), max(1, cores - 1), cores}))


def namespace_for(model: LoadedModel, runner: ModelRunner) -> bytes:
    """Digest of all that decides what a block's bytes mean: workers of one share blocks."""
    description = dataclasses.asdict(runner.kv_description)
    parts = NamespaceParts(weights=model.revision, block_tokens=runner.block_tokens, **description)
    return namespace_of(parts)


def _llama(model: LoadedModel, path: Path, size: EngineSize, kv: KvSettings, clock: Clock) -> LlamaRunner:
    settings = LlamaSettings(
        path=path,
        context_tokens=model.context_tokens,
        max_sequences=size.max_sequences,
        max_step_tokens=max(size.token_budget, size.max_sequences),
        thread_counts=thread_counts(size.threads),
        kv_type=KvType(kv.kv_type),
    )
    return LlamaRunner(settings, clock)


def _scripted(model: LoadedModel, size: EngineSize) -> ScriptedRunner:
    entry = model.entry
    times = StepTimes(entry.step_s, entry.prefill_token_s, entry.decode_row_s)
    settings = ScriptedSettings(
        context_tokens=model.context_tokens,
        max_sequences=size.max_sequences,
        kv_token_bytes=entry.kv_token_bytes,
        step_s=times,
        prefill_tokens_per_s=times.prefill_tokens_per_s,
        fault_after=entry.fault_after,
        die_after=entry.die_after,
        die_on=entry.die_on,
    )
    return ScriptedRunner(SCRIPTS[entry.script], settings, time.sleep)
