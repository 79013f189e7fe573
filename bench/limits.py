"""`bench limits`: limits that two gateways share, what they cost, and books that add up.

Three parts, each with servers of its own: bursts at a window's border (limits_border.py), CPU a request
(limits_cost.py), usage while clients leave and servers die (limits_usage.py). There is no peer: what is
compared is what was promised.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from bench import limits_border, limits_cost, limits_usage
from bench.limits_border import BorderSettings
from bench.limits_cost import CostSettings
from bench.limits_usage import UsageSettings
from bench.machine import describe
from bench.report import Run, Value, today


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of the parts."""

    border: BorderSettings = field(default_factory=BorderSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    usage: UsageSettings = field(default_factory=UsageSettings)

    @classmethod
    def quick(cls) -> Settings:
        return cls(
            border=BorderSettings(num_rounds=1),
            cost=CostSettings(num_rounds=3, num_requests=200, num_own=1000),
            usage=UsageSettings(num_requests=1500, num_worker_kills=2),
        )


async def run(settings: Settings, *, is_quick: bool) -> Run:
    """All parts."""
    border = await limits_border.measure(settings.border)
    costs = await limits_cost.measure(settings.cost)
    books = await limits_usage.measure(settings.usage)
    shown: dict[str, Value] = {}
    for part, values in asdict(settings).items():
        shown |= {f"{part}.{name}": _shown(value) for name, value in values.items()}
    return Run(
        bench="limits",
        date=today(),
        quick=is_quick,
        machine=describe(),
        settings=shown,
        figures=[*border.figures(), *costs.figures(), *books.figures()],
        raw={**border.rows(), **costs.rows(), "books": books.row()},
    )


def _shown(value: object) -> Value:
    """A setting; several values as text."""
    return value if isinstance(value, int | float) else str(value)
