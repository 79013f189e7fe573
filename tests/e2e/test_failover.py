"""Workers of a running `antiphon serve` die, stall and stop; streams of the openai SDK do not notice."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import psutil
import pytest
from tests.support.served import PATIENCE_S, Served, serving

CATALOGUE = """[[model]]
name = "noise"
engine = "scripted"
script = "noise"
context = 1024
step_s = 0.015
die_on = "poisonous"
"""
NUM_TOKENS = 120


@dataclass(frozen=True)
class Said:
    """What one choice of a stream said."""

    text: str
    logprobs: tuple[Any, ...]
    finish: str | None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three workers behind one gateway."""
    file = tmp_path_factory.mktemp("catalogue") / "models.toml"
    file.write_text(CATALOGUE)
    options = ("--model", "noise", "--catalogue", str(file), "--workers", "3", "--port", "0")
    with serving(*options) as running:
        yield running


def client_of(served: Served) -> openai.OpenAI:
    """One that does not try again by itself."""
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def stream_of(served: Served, seed: int) -> Iterator[Any]:
    """The chunks of one answer with two choices, at temperature 1, penalised and scored."""
    with client_of(served) as client:
        yield from client.chat.completions.create(
            model="noise",
            messages=[{"role": "user", "content": f"Number {seed}, please."}],
            stream=True,
            stream_options={"include_usage": True},
            n=2,
            seed=seed,
            temperature=1.0,
            frequency_penalty=0.6,
            logprobs=True,
            top_logprobs=2,
            max_tokens=NUM_TOKENS,
            stop=["~~~~"],
        )


def said(chunks: list[Any]) -> tuple[list[Said], int]:
    """What the choices said, and how many tokens they were billed for."""
    found = []
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        scores = [score for c in mine if c.logprobs for score in c.logprobs.content]
        finishes = [c.finish_reason for c in mine if c.finish_reason]
        assert len(finishes) == 1
        found.append(Said("".join(c.delta.content or "" for c in mine), tuple(scores), finishes[0]))
    return found, chunks[-1].usage.completion_tokens


def workers_of(served: Served) -> list[psutil.Process]:
    """Those that run now, by name."""
    found = [child for child in served.children() if "worker" in child.cmdline()]
    return sorted(found, key=lambda child: child.cmdline()[child.cmdline().index("--name") + 1])


def wait_for_links(served: Served) -> None:
    """Until the gateway has three workers."""
    until = time.monotonic() + PATIENCE_S
    while metric(served, "antiphon_worker_up") < 3:
        assert time.monotonic() < until, "a worker did not come back"
        time.sleep(0.05)


def metric(served: Served, name: str, label: str = "") -> float:
    """The sum of a gateway's metric over samples with this label."""
    with openai.OpenAI(base_url=served.url, api_key="any") as client:
        text = client.get("/metrics", cast_to=str)
    lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_any_worker_may_be_lost_in_mid_stream(served: Served, kind: signal.Signals) -> None:
    """One after the other all three are, so that the stream's own is among them: it is complete and right."""
    wait_for_links(served)
    seed = int(kind)
    calm = said(list(stream_of(served, seed)))
    moved_before = metric(served, "antiphon_answer_moves_total")
    victims = workers_of(served)
    assert len(victims) == 3
    chunks = []
    stopped: list[psutil.Process] = []
    for chunk in stream_of(served, seed):
        chunks.append(chunk)
        if victims and len(chunks) > (4 - len(victims)) * NUM_TOKENS // 3:
            victim = victims.pop()
            victim.send_signal(kind)
            while stopped:
                stopped.pop().resume()
            if kind is signal.SIGSTOP:
                stopped.append(victim)
    for victim in stopped:
        victim.resume()
    assert not victims
    assert said(chunks) == calm
    assert calm[1] == sum(len(choice.logprobs) for choice in calm[0])
    assert metric(served, "antiphon_answer_moves_total") > moved_before


def test_a_worker_that_is_told_to_stop_loses_nothing(served: Served) -> None:
    """SIGTERM to each worker in turn under load: every stream is complete and right."""
    wait_for_links(served)
    seeds = range(100, 106)
    with ThreadPoolExecutor(len(seeds)) as pool:
        calm = list(pool.map(lambda seed: said(list(stream_of(served, seed))), seeds))
        futures = [pool.submit(lambda seed=seed: said(list(stream_of(served, seed)))) for seed in seeds]
        for worker in workers_of(served):
            worker.terminate()
            wait_for_links_again(served, worker)
        assert [future.result() for future in futures] == calm


def wait_for_links_again(served: Served, ended: psutil.Process) -> None:
    """Until this worker has ended and another life of it is linked."""
    ended.wait(PATIENCE_S)
    wait_for_links(served)


def test_a_request_that_kills_workers_harms_nobody_else(served: Served) -> None:
    """Two workers die of it, then it is refused; streams beside it are complete and right."""
    wait_for_links(served)
    seeds = range(200, 204)
    with ThreadPoolExecutor(len(seeds)) as pool:
        calm = list(pool.map(lambda seed: said(list(stream_of(served, seed))), seeds))
        futures = [pool.submit(lambda seed=seed: said(list(stream_of(served, seed)))) for seed in seeds]
        before = {worker.pid for worker in workers_of(served)}
        for _ in range(2):
            with client_of(served) as client, pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(model="noise", prompt="a poisonous one")
            assert (caught.value.status_code, caught.value.code) == (422, "request_quarantined")
        assert [future.result() for future in futures] == calm
    wait_for_links(served)
    assert len(before - {worker.pid for worker in workers_of(served)}) == 2
