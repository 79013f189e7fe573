"""How far the engine is from what the machine's cores can do.

The yardstick is numpy's float32 matrix product on the same cores in the same run, once with many rows
(prefill) and once with 16 (a decode step of 16 sequences). Kernels that multiply bfloat16 or int8 can
do twice or four times as much, so a share above 1 is possible and the way to go.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np

from bench.client import Target
from bench.load import completions, in_turn, insist, median, open_load, percentile

# SmolLM2-135M: arithmetic of one token in the layers, and with the output layer.
_LAYERS_FLOP = 0.21e9
_DECODE_FLOP = 0.27e9
_PREFILL_TOKENS = 400
_LIMIT_S = 300.0
_PRODUCTS = 5


@dataclass(frozen=True, slots=True)
class Floors:
    """Speeds of the engine, and shares of the machine's float32 matrix product."""

    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_share: float
    decode_share: float


async def measure_floors(target: Target, model: str, num_streams: int) -> Floors:
    """A lone long prompt, then `num_streams` short ones decoding together."""
    draw = random.Random("floors")
    prompts = completions(draw, [0.0] * 4, model=model, prompt_tokens=_PREFILL_TOKENS, answer_tokens=1)
    lone = insist(await in_turn(target, prompts, _LIMIT_S), "prefill probe")
    short = completions(draw, [0.0] * num_streams, model=model, prompt_tokens=8, answer_tokens=96)
    batch = insist(await open_load(target, short, _LIMIT_S), "decode probe")
    prefill = _PREFILL_TOKENS / median([a.ttft_s for a in lone])
    step_s = percentile([a.tpot_s for a in batch], 50)
    return Floors(
        prefill,
        step_s,
        prefill * _LAYERS_FLOP / product_flops(512),
        num_streams * _DECODE_FLOP / step_s / product_flops(num_streams),
    )


def product_flops(rows: int, inner: int = 576, columns: int = 12288) -> float:
    """Floating-point operations a second of numpy's float32 product rows×inner by inner×columns."""
    left = np.ones((rows, inner), np.float32)
    right = np.ones((inner, columns), np.float32)
    out = np.empty((rows, columns), np.float32)
    times = []
    for _ in range(_PRODUCTS):
        started_s = time.perf_counter()
        np.matmul(left, right, out=out)
        times.append(time.perf_counter() - started_s)
    return 2.0 * rows * inner * columns / min(times)
