"""What a worker says to autoscalers."""

from __future__ import annotations

from antiphon.core.generation import Load, Role, WorkerRates
from antiphon.obs.metrics import WorkerMetrics
from antiphon.worker.meter import measure
from support.loopback import worker_info

INFO = worker_info("m", role=Role.PREFILL, num_blocks=200, max_sequences=4)


def values(load: Load) -> dict[str, float]:
    """The four signals, by the ends of their names."""
    metrics = WorkerMetrics()
    measure(metrics.scale, INFO, load)
    lines = [line for line in metrics.render().decode().splitlines() if 'model="m",role="prefill"' in line]
    return {line.partition("{")[0].removeprefix("antiphon_"): float(line.split()[-1]) for line in lines}


def test_its_load_is_told_by_model_and_role() -> None:
    """Tokens, sequences, the share of blocks in use, and seconds by the router's formula."""
    rates = WorkerRates(prefill_tokens_per_s=500.0, step_s=0.02)
    load = Load(
        9, running=2, waiting=1, waiting_tokens=750, free_blocks=100, cached_blocks=50, used_blocks=50
    )
    assert values(load) == {
        "queue_tokens": 750,
        "running_sequences": 2,
        "kv_pressure": 0.25,
        "estimated_wait_seconds": 0.0,
    }
    measured = Load(9, 2, 1, 750, 100, 50, 50, rates=rates)
    assert values(measured)["estimated_wait_seconds"] == 1.5
