"""F23: a worker that runs out of memory: it alone dies, and no answer is lost, cut or changed."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
from tests.support.served import PATIENCE_S, Served, serving

CATALOGUE = """[[model]]
name = "copy"
engine = "scripted"
script = "echo"
context = 4096
step_s = 0.002
kv_token_bytes = 4096
"""
NUM_CALLERS = 24
MAX_ROUNDS = 20
TAKEN_BYTES = 100 * 2**20  # of what it has reserved already


def workers_of(served: Served) -> list[psutil.Process]:
    """Those that run now, by name."""
    found = [child for child in served.children() if "worker" in child.cmdline()]
    return sorted(found, key=lambda child: child.cmdline()[child.cmdline().index("--name") + 1])


def is_right(served: Served, seed: int) -> bool:
    """Whether a streamed answer says what it should: the beginning of its question."""
    text = "".join(random.Random(seed).choices("abcdefgh", k=3900))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="copy", messages=[{"role": "user", "content": text}], max_tokens=32, stream=True
        )
        pieces = [chunk.choices[0] for chunk in stream]
    said = "".join(piece.delta.content or "" for piece in pieces)
    return said == text[:32] and pieces[-1].finish_reason == "length"


def test_a_worker_without_memory_dies_alone(tmp_path: Path) -> None:
    """Its KV tier gives up first, then its engine; all answers are right, and another life takes over."""
    file = tmp_path / "models.toml"
    file.write_text(CATALOGUE)
    options = ("--model", "copy", "--catalogue", str(file), "--workers", "3", "--port", "0")
    tiers = ("--kv-host-mib", "4096", "--max-sequences", "32")
    with serving(*options, *tiers) as served, ThreadPoolExecutor(NUM_CALLERS) as pool:
        assert all(pool.map(lambda seed: is_right(served, seed), range(NUM_CALLERS)))
        before = workers_of(served)
        victim = before[1]
        limit = victim.memory_info().vms - TAKEN_BYTES  # nothing more is mapped from now on
        victim.rlimit(psutil.RLIMIT_AS, (limit, limit))
        for round_ in range(1, MAX_ROUNDS + 1):
            seeds = range(round_ * NUM_CALLERS, (round_ + 1) * NUM_CALLERS)
            assert all(pool.map(lambda seed: is_right(served, seed), seeds))
            if not victim.is_running():
                break
        assert not victim.is_running()
        until = time.monotonic() + PATIENCE_S
        while len(workers_of(served)) < len(before):
            assert time.monotonic() < until, "the worker did not come back"
            time.sleep(0.05)
        after = {worker.pid for worker in workers_of(served)}
        assert {worker.pid for worker in before} - after == {victim.pid}
        assert is_right(served, 0)
