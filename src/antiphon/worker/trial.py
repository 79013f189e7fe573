"""Tries one weight format in a process of its own: makes the file, measures it, compares it.

A child process, because native code that dies on a strange file must not take the worker along, and
because a second model must be gone from memory before the next one is loaded. The order comes as
JSON in argv, the result goes to stdout as JSON; llama.cpp's words and tracebacks go to stderr.

Speed is measured on the very runner that will serve. Closeness is measured on `perplexity.txt`: the
source leaves its logits in a file, every candidate is compared with them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import llama_cpp
import msgspec
import numpy as np

from antiphon.core.clock import WallClock
from antiphon.engine.llama import LlamaRunner, LlamaSettings
from antiphon.engine.runner import Chunk
from antiphon.worker.closeness import Closeness, Logits, compare
from antiphon.worker.lifeline import follow_parent

PREFILL_TOKENS = 256
BATCH_SEQUENCES = 8
_DECODE_PROMPT_TOKENS = 32
_CONTEXT_TOKENS = 512
_MIN_REPEATS = 3
_MAX_REPEATS = 256  # answers must fit the context

FORMATS = {
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q5_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


class TrialFailed(Exception):
    """A format could not be made or run; the message says why."""


class TrialEffort(msgspec.Struct, frozen=True):
    """How long and on how much text a trial measures."""

    seconds: float = 0.7  # per rate
    text_tokens: int = 512
    timeout_s: float = 900.0


class TrialOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One trial. `format` None measures the source itself and writes `reference`; else reads it."""

    source: str
    format: str | None
    output: str  # the file to make of it
    reference: str
    threads: int
    effort: TrialEffort


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial found."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # one sequence
    batch_tokens_per_s: float  # BATCH_SEQUENCES together
    closeness: Closeness
    num_params: int


def run_in_child(order: TrialOrder) -> Measured:
    """Run a trial in a child process. Raises TrialFailed."""
    command = [sys.executable, "-m", "antiphon.worker.trial", msgspec.json.encode(order).decode()]
    stdin, lifeline = os.pipe()  # closes with this process, however it ends
    try:
        done = subprocess.run(
            command,
            stdin=stdin,
            capture_output=True,
            timeout=order.effort.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TrialFailed(f"not done after {order.effort.timeout_s:.0f} s") from error
    finally:
        os.close(stdin)
        os.close(lifeline)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise TrialFailed(words[-1] if words else f"the process ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Measured)


def run_trial(order: TrialOrder) -> Measured:
    """Make the file, measure it, compare it. Raises TrialFailed."""
    path = Path(order.source)
    if order.format is not None:
        path = Path(order.output)
        quantise(order.source, order.format, order.output)
    logits, ids, num_params = _read_text(path, order)
    if order.format is None:
        np.save(order.reference, logits)
    closeness = compare(logits, np.load(order.reference, mmap_mode="r", allow_pickle=False), ids)
    prefill, decode, batch = _rates(path, order)
    return Measured(
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
        batch_tokens_per_s=batch,
        closeness=closeness,
        num_params=num_params,
    )


def quantise(source: str, format_name: str, output: str) -> None:
    """Write `source` in another format: the same bytes on every machine. Raises TrialFailed."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[format_name]
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(params)) != 0:
        raise TrialFailed(f"llama.cpp could not write the weights as {format_name}: is the disk full?")


def _read_text(path: Path, order: TrialOrder) -> tuple[Logits, list[int], int]:
    """Logits [tokens, vocab] of the built-in text, its ids, and the model's number of parameters."""
    text = resources.files("antiphon.worker").joinpath("perplexity.txt").read_bytes()
    num = order.effort.text_tokens
    model = llama_cpp.Llama(
        str(path),
        n_ctx=num,
        n_threads=order.threads,
        n_threads_batch=order.threads,
        logits_all=True,
        verbose=False,
    )
    ids = model.tokenize(text, add_bos=True)[:num]
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)], dtype=np.float32)
    num_params = int(llama_cpp.llama_model_n_params(model.model))
    model.close()
    return logits, ids, num_params


def _rates(path: Path, order: TrialOrder) -> tuple[float, float, float]:
    """Tokens a second: prefill, decode of one sequence, decode of BATCH_SEQUENCES."""
    settings = LlamaSettings(
        path=path,
        context_tokens=_CONTEXT_TOKENS,
        max_sequences=BATCH_SEQUENCES,
        max_step_tokens=PREFILL_TOKENS,
        thread_counts=(order.threads,),
    )
    runner, seconds = LlamaRunner(settings, WallClock()), order.effort.seconds
    try:
        return (
            _prefill_rate(runner, seconds),
            _decode_rate(runner, 1, seconds),
            _decode_rate(runner, BATCH_SEQUENCES, seconds),
        )
    finally:
        runner.close_model()


def _prefill_rate(runner: LlamaRunner, seconds: float) -> float:
    ids = [i % runner.vocab_size for i in range(100, 100 + PREFILL_TOKENS)]

    def step() -> float:
        runner.open(0, [])
        took_s = _timed(runner, [Chunk(0, 0, ids, True)])
        runner.close(0)
        return took_s

    return PREFILL_TOKENS / _least_s(step, seconds)


def _decode_rate(runner: LlamaRunner, num_sequences: int, seconds: float) -> float:
    prompt = [i % runner.vocab_size for i in range(100, 100 + _DECODE_PROMPT_TOKENS)]
    for sequence in range(num_sequences):
        runner.open(sequence, [])
    runner.run([Chunk(sequence, 0, prompt, False) for sequence in range(num_sequences)])
    positions = itertools.count(_DECODE_PROMPT_TOKENS)

    def step() -> float:
        position = next(positions)
        ids = [position % runner.vocab_size]
        return _timed(runner, [Chunk(sequence, position, ids, True) for sequence in range(num_sequences)])

    least_s = _least_s(step, seconds)
    for sequence in range(num_sequences):
        runner.close(sequence)
    return num_sequences / least_s


def _timed(runner: LlamaRunner, chunks: list[Chunk]) -> float:
    started = time.perf_counter()
    runner.run(chunks)
    return time.perf_counter() - started


def _least_s(step: Callable[[], float], seconds: float) -> float:
    """Seconds of the fastest `step` of about `seconds` of them: others on the machine only slow it down."""
    times: list[float] = []
    while len(times) < _MIN_REPEATS or (sum(times) < seconds and len(times) < _MAX_REPEATS):
        times.append(step())
    return min(times)


def main() -> None:
    """Entry point of the child process."""
    follow_parent()
    order = msgspec.json.decode(sys.argv[1], type=TrialOrder)
    try:
        measured = run_trial(order)
    except TrialFailed as error:
        sys.exit(str(error))
    sys.stdout.write(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main()
