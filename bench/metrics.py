"""What our servers count of themselves, read from their /metrics."""

from __future__ import annotations

import asyncio

import httpx2

from bench.errors import BenchFault
from bench.servers import Server

_POLL_S = 0.02
_LINK_S = 30.0


async def metric(server: Server, name: str, missing: float | None = None) -> float:
    """The sum of a metric's samples, `missing` where there are none. Raises BenchFault where that is None."""
    async with httpx2.AsyncClient(trust_env=False) as http:
        text = (await http.get(server.url + "/metrics")).raise_for_status().text
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    values = [float(value) for sample, _, value in samples if sample.partition("{")[0] == name]
    if not values and missing is not None:
        return missing
    if not values:
        raise BenchFault(f"{server.command.name}'s /metrics has no {name}")
    return sum(values)


async def num_computed(worker: Server) -> int:
    """Prompt tokens that a worker has computed since it was started."""
    return int(await metric(worker, "antiphon_prefill_tokens_total"))


async def linked(gateway: Server, num_workers: int = 1) -> None:
    """Wait until a gateway has reached its workers."""
    try:
        async with asyncio.timeout(_LINK_S):
            while True:
                if await metric(gateway, "antiphon_worker_up") >= num_workers:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise BenchFault(f"the gateway did not reach its workers within {_LINK_S:g} s") from None
