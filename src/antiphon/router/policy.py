"""Which replica takes a generation. Pure, so that the simulator runs the same rule.

Today: the least loaded of the replicas that serve the model, ties by lot, so that gateways which
see the same figures do not all run to the same worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica as one gateway sees it, in sequences.

    `dispatched` were sent since the last report, so the report cannot know them. `own` are this
    gateway's unfinished ones: a report that left the worker before they arrived misses them.
    """

    running: int
    waiting: int
    dispatched: int
    own: int

    @property
    def sequences(self) -> int:
        """The best lower bound of what is there."""
        return max(self.running + self.waiting + self.dispatched, self.own)


def choose(replicas: Sequence[ReplicaLoad], draw: float) -> int | None:
    """Index of the replica to take, None where there is none. `draw` in [0, 1) settles ties."""
    if not replicas:
        return None
    least = min(replica.sequences for replica in replicas)
    best = [index for index, replica in enumerate(replicas) if replica.sequences == least]
    return best[int(draw * len(best))]
