"""A generation: what a request becomes below the gateway, and what comes back of it.

Everything here is a frozen msgspec struct, so one definition serves the engine, the wire and the
simulator. Token ids, never text (a `Backend` that wants messages finds them in `messages`).
"""

from __future__ import annotations

import enum

import msgspec


class Priority(enum.IntEnum):
    """Admission classes, most urgent first."""

    INTERACTIVE = 0
    DEFAULT = 1
    BATCH = 2


class Terminal(enum.StrEnum):
    """How an answer ended. Every choice of every generation ends in exactly one of these."""

    STOP = "stop"  # the model ended its turn, or a stop string or id came
    LENGTH = "length"  # max_tokens or the context's end
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ABORTED = "aborted"  # the client left or asked to stop
    DEADLINE = "deadline"  # its time ran out
    LOST = "lost"  # the worker died
    ERROR = "error"  # the step that computed it failed
    REFUSED = "refused"  # the worker did not take it: `error` is "code: message"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Applied in the order of the fields below.

    Penalties count answer tokens only, never the prompt's. `temperature` 0 is greedy.
    """

    seed: int
    max_tokens: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    top_p: float = 1.0
    logprobs: int | None = None  # None: off; k: the chosen token's and the k best
    stop_ids: tuple[int, ...] = ()  # end-of-turn tokens of the model; not part of the text
    min_tokens: int = 0  # stop_ids are barred before this many


class Constraint(msgspec.Struct, frozen=True):
    """A grammar the answer must follow, replayed from the answer's start."""

    kind: str
    source: str


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request below the gateway.

    `token_ids` holds the prompt and, after a failover, the answer tokens already received:
    ids beyond `num_prompt_tokens` are answer. Positions of a choice's answer count from there.
    """

    id: str
    model: str
    sampling: Sampling
    token_ids: list[int] = []
    num_prompt_tokens: int = 0
    messages: bytes = b""  # JSON, only for backends that take no token ids
    revision: str = ""
    num_public_tokens: int = 0  # leading prompt tokens whose blocks the operator made public
    scope: bytes = b""  # whose the other blocks are: made by the gateway from a secret, never client text
    session: bytes = b""  # the same over a conversation, a digest made by the gateway; empty: not known
    tenant: str = "local"
    priority: Priority = Priority.DEFAULT
    timeout_s: float | None = None  # left when sent: clocks of two hosts differ
    constraint: Constraint | None = None
    lora: str | None = None
    n: int = 1
    choice: int | None = None  # compute this one of the `n` only: it goes on where another worker ended
    is_prefill_only: bool = False  # compute the prompt's KV, offer it to the tiers, answer nothing
    trace: str = ""  # W3C traceparent

    @property
    def choices(self) -> range:
        """The choices this worker is to compute."""
        return range(self.n) if self.choice is None else range(self.choice, self.choice + 1)

    @property
    def kv_scope(self) -> bytes:
        """The scope its own blocks lie in: another one for every tenant, never a public one.

        Where the gateway gave none it is the tenant's name with a prefix that a derived scope, being
        a digest, does not have.
        """
        return self.scope or b"tenant:" + self.tenant.encode()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one answer position: of the chosen id, and of the best ones, best first."""

    chosen: float
    top: list[tuple[int, float]] = []


class CachedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens that were not computed, by the tier that held their KV."""

    engine: int = 0
    host: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.engine + self.host + self.store


class KvReport(msgspec.Struct, frozen=True, array_like=True):
    """Where the KV of a prompt's full blocks came from, in blocks, and what fetching them cost.

    `decision` is one of: none (all was there), fetched, missed (the store had none), slower (computing
    was expected to be faster), busy (too much under way), late, fault, open_breaker, no_store.
    """

    num_local: int = 0
    num_host: int = 0
    num_store: int = 0
    num_computed: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    saved_s: float = 0.0  # estimated: computing what was taken over, less the fetch
    decision: str = "none"

    def __str__(self) -> str:
        """For a log line: `14 local, 6 host, 22 redis, 8 computed; fetched 16 MB in 9 ms, saved 410 ms`."""
        text = f"{self.num_local} local, {self.num_host} host, {self.num_store} redis"
        text += f", {self.num_computed} computed"
        if self.fetched_bytes:
            text += f"; fetched {_megabytes(self.fetched_bytes)} in {1000 * self.fetch_s:.0f} ms"
            text += f", saved {1000 * self.saved_s:.0f} ms"
        return text if self.decision in ("none", "fetched") else f"{text}; {self.decision}"


def _megabytes(num_bytes: int) -> str:
    megabytes = num_bytes / 1e6
    return f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.1f} MB"


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step brought for one choice: new answer ids, or its end, or both.

    `position` is the answer position of `ids[0]`: outputs of a choice are gapless and in order.
    `cached` and `queued_s` (seconds from the worker's receipt to the first step that computed some of
    it) come once, with the choice's first output; `kv`, where there are tiers beyond the engine, with
    the first output of the choice that was admitted first. After `finish` nothing follows.
    """

    generation: str
    choice: int
    position: int
    ids: list[int]
    finish: Terminal | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached: CachedTokens | None = None
    error: str | None = None
    queued_s: float | None = None
    kv: KvReport | None = None


class Role(enum.StrEnum):
    """What a worker is for."""

    BOTH = "both"
    PREFILL = "prefill"  # computes long prompts for others to answer
    DECODE = "decode"  # answers, after a long prompt was computed elsewhere


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself once per connection."""

    worker: str
    model: str
    revision: str  # digest of the weights really served
    namespace: str  # KV blocks are interchangeable exactly within one namespace
    engine: str
    version: str
    context_tokens: int
    block_tokens: int
    num_blocks: int
    max_sequences: int
    role: Role = Role.BOTH


class WorkerRates(msgspec.Struct, frozen=True, array_like=True):
    """How fast a worker does what a router weighs, measured by itself. 0: not known yet."""

    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0  # of a step that decodes only
    store_rtt_s: float = 0.0
    store_blocks_per_s: float = 0.0  # fetched and verified
    import_s_per_block: float = 0.0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy a worker is. `step` counts engine steps and proves progress.

    `waiting_tokens`: of prompts, still to be computed, also of sequences that run already.
    """

    step: int
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    draining: bool = False
    rates: WorkerRates = WorkerRates()
