"""Talking to a real `antiphon serve` about its KV: chats, what its workers' `/kv` pages say, its Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil

from antiphon.cli.runfolder import RunCard, living_runs
from antiphon.worker.kvinfo import KvInfo
from support.served import PATIENCE_S, Served


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something that other processes do; `what` is the complaint where it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def card_of(served: Served) -> RunCard:
    """What the run tells other commands about itself."""
    (card,) = living_runs(Path(served.process_environ("XDG_STATE_HOME")) / "antiphon")
    return card


def redis_of(served: Served) -> psutil.Process:
    """The Redis that this `serve` runs."""
    return next(c for c in served.children() if "server" in c.name() and "antiphon" not in c.name())


def infos_of(served: Served) -> list[KvInfo]:
    """Each worker's `/kv` page, of those that answer."""
    card = card_of(served)
    secret = Path(card.secret_file).read_text()
    pages: list[KvInfo] = []
    for worker in card.workers:
        try:
            reply = httpx2.get(f"{worker}/kv", headers={"authorization": f"Bearer {secret}"}, trust_env=False)
        except httpx2.HTTPError:
            continue
        pages.append(msgspec.json.decode(reply.content, type=KvInfo))
    return pages


def num_stored(served: Served) -> int:
    """Blocks that the workers which answer have written to Redis."""
    stores = [info.stats.store for info in infos_of(served)]
    return sum(store.num_stored for store in stores if store is not None)


def chat(served: Served, messages: list[dict[str, str]], key: str = "any", **fields: object) -> Any:
    """One chat, decoded."""
    body = {"model": "smollm2", "messages": messages, "max_tokens": 12, "temperature": 0} | fields
    reply = httpx2.post(
        f"{served.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(answer: Any) -> int:
    """Prompt tokens that were not computed, as the client is told."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
