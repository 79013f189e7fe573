"""When is fetching KV faster than computing it? The arithmetic, for deployments that are typical.

Fetching wins where the store delivers more bytes a second than the engine produces by computing:
`prefill tokens/s × KV bytes/token`. Prefill is bound by arithmetic, causal attention included::

    seconds(n) = (2 · parameters · n + 2 · layers · attention width · n²) / (GPUs · peak · share reached)

so long prefixes need less bandwidth. Pure estimates on paper: what this fleet really does is measured
by the cost gate (gate.py). docs/break-even.md is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARE_OF_PEAK = 0.6  # of the arithmetic peak that prefill reaches; 0.45 … 0.7 are common


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on the hardware of one replica. Arithmetic in dense BF16 operations a second."""

    name: str
    num_parameters: float
    num_layers: int
    attention_width: int  # query heads × head size
    kv_bytes_per_token: int
    peak_flops_per_s: float

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds to compute a prefix of so many tokens."""
        dense = 2 * self.num_parameters * num_tokens
        attention = 2 * self.num_layers * self.attention_width * num_tokens**2
        return (dense + attention) / (self.peak_flops_per_s * SHARE_OF_PEAK)

    def break_even_bytes_per_s(self, num_tokens: int) -> float:
        """The bandwidth at which fetching this prefix takes as long as computing it."""
        return num_tokens * self.kv_bytes_per_token / self.prefill_s(num_tokens)


_H100, _L40S, _CORE = 989e12, 362e12, 0.1e12  # a core of a server CPU with AVX-512, 8-bit weights

_LLAMA_8B = Deployment(
    name="Llama-3-8B BF16, 1 H100",
    num_parameters=8.03e9,
    num_layers=32,
    attention_width=4096,
    kv_bytes_per_token=131_072,
    peak_flops_per_s=_H100,
)

DEPLOYMENTS = (
    Deployment(
        name="SmolLM2-135M, 2 CPU cores",
        num_parameters=134.5e6,
        num_layers=30,
        attention_width=576,
        kv_bytes_per_token=23_040,
        peak_flops_per_s=2 * _CORE,
    ),
    replace(_LLAMA_8B, name="Llama-3-8B, 32 CPU cores", peak_flops_per_s=32 * _CORE),
    replace(_LLAMA_8B, name="Llama-3-8B BF16, 1 L40S", peak_flops_per_s=_L40S),
    _LLAMA_8B,
    Deployment(
        name="Llama-3-70B BF16, 8 H100",
        num_parameters=70.6e9,
        num_layers=80,
        attention_width=8192,
        kv_bytes_per_token=327_680,
        peak_flops_per_s=8 * _H100,
    ),
    Deployment(
        name="Llama-3.1-405B BF16, 16 H100",
        num_parameters=405.9e9,
        num_layers=126,
        attention_width=16_384,
        kv_bytes_per_token=516_096,
        peak_flops_per_s=16 * _H100,
    ),
)
