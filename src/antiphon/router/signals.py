"""What autoscalers need to know of the workers, by model and role. Pure but for reading the links.

The figures are those the router chooses by: loads counted on with what was sent since, the expected
wait by the same formula (core/wait.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from antiphon.core.generation import Role
from antiphon.router.cost import cost, peer_rates
from antiphon.router.link import WorkerLink
from antiphon.router.policy import NO_OVERLAP, Ask, ReplicaState


@dataclass(frozen=True, slots=True)
class Signals:
    """All workers of a model and role that take work, together.

    `wait_s`: at the one where a request would wait least; `kv_pressure`: share of their blocks that
    running sequences hold.
    """

    num_workers: int
    queue_tokens: int
    running: int
    kv_pressure: float
    wait_s: float


def signals_of(states: Iterable[ReplicaState]) -> Signals:
    """The signals of some workers; there is at least one."""
    states = list(states)
    peers = peer_rates(states)
    ask = Ask(num_tokens=1, block_tokens=1)
    num_blocks = sum(state.num_blocks for state in states)
    num_used = sum(max(state.num_blocks - state.free_blocks, 0) for state in states)
    return Signals(
        num_workers=len(states),
        queue_tokens=sum(state.waiting_tokens + state.dispatched_tokens for state in states),
        running=sum(state.running for state in states),
        kv_pressure=num_used / num_blocks if num_blocks else 0.0,
        wait_s=min(cost(ask, state, NO_OVERLAP, peers).wait_s for state in states),
    )


def signals(links: Iterable[WorkerLink]) -> Mapping[tuple[str, Role], Signals]:
    """By model and role, of the workers that take work now."""
    groups: dict[tuple[str, Role], list[ReplicaState]] = defaultdict(list)
    for link in links:
        if link.info is not None and link.takes_work:
            groups[link.info.model, link.info.role].append(link.state())
    return {group: signals_of(states) for group, states in groups.items()}
