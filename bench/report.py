"""A bench's outcome: figures, goals, which were missed; how it is printed and stored.

The last line a bench prints is one JSON object {bench, figures, goals, missed}. A full run is stored as
bench/runs/NAME.json, from which docs/benchmarks.md is made; a quick or partial one only beside it as
NAME.tmp, which git ignores. A figure that could not be measured is null and misses its goal.
"""

from __future__ import annotations

import datetime
import math
import operator
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bench.machine import Machine

RUNS = Path(__file__).parent / "runs"
_COMPARE = {"<=": operator.le, ">=": operator.ge}

Value = str | int | float | bool | None


class Figure(msgspec.Struct, frozen=True):
    """One ratio, what it says in words, and the goal it has to reach, if any."""

    name: str
    value: float | None
    meaning: str
    goal: str | None = None

    @property
    def is_missed(self) -> bool:
        if self.goal is None:
            return False
        sign, bound = self.goal.split()
        return self.value is None or not _COMPARE[sign](self.value, float(bound))


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one bench, as it is stored. `raw` holds the medians behind the ratios, by row."""

    bench: str
    date: str
    quick: bool
    machine: Machine
    settings: dict[str, Value]
    figures: list[Figure]
    raw: dict[str, dict[str, Value]]

    def last_line(self) -> str:
        """The JSON object that a bench's output ends with."""
        line = {
            "bench": self.bench,
            "figures": {f.name: f.value for f in self.figures},
            "goals": {f.name: f.goal for f in self.figures if f.goal is not None},
            "missed": [f.name for f in self.figures if f.is_missed],
        }
        return msgspec.json.encode(line).decode()


def figure(name: str, value: float, meaning: str, goal: str | None = None) -> Figure:
    """A figure, rounded to what a bench can know; NaN and infinity become null."""
    return Figure(name, rounded(value), meaning, goal)


def rounded(value: float, digits: int = 4) -> float | None:
    """The value to `digits` significant digits, None where it is not a number."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def today() -> str:
    """The date of a run."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def store(run: Run, *, is_full: bool, folder: Path = RUNS) -> Path:
    """Write the run where it belongs and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.bench}.{'json' if is_full else 'tmp'}"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    return path


def stored(folder: Path = RUNS) -> list[Run]:
    """All full runs, by name."""
    return [msgspec.json.decode(path.read_bytes(), type=Run) for path in sorted(folder.glob("*.json"))]


def table(rows: Mapping[str, Mapping[str, Value]]) -> list[str]:
    """Rows as a Markdown table; columns in order of first sight."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(_cell(row.get(c)) for c in columns) + " |")
    return lines


def _cell(value: Value) -> str:
    if value is None:
        return "–"
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 10000
        else f"{value:,}"
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else str(value)
    )
