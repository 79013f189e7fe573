"""bench/report.py and bench/docs.py: figures, goals, storage, the generated page."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from bench import docs
from bench.machine import Machine, describe
from bench.report import Figure, Run, figure, rounded, store, stored, table

MACHINE = Machine(
    cpu="Test CPU",
    cores=2,
    memory_gib=24.0,
    system="Linux 6",
    python="3.11.2",
    llama_cpp_python="0.3.36",
    commit="abc1234",
)


def run(*figures: Figure, bench: str = "engine") -> Run:
    """A run with these figures."""
    return Run(
        bench=bench,
        date="2026-12-01",
        quick=False,
        machine=MACHINE,
        settings={"threads": 2},
        figures=list(figures),
        raw={"ours": {"tokens/s": 170.2}, "peer": {"tokens/s": 95.0, "wrong": 3}},
    )


@pytest.mark.parametrize(
    ("value", "goal", "is_missed"),
    [
        (0.8, "<= 0.8", False),
        (0.81, "<= 0.8", True),
        (1.5, ">= 1.5", False),
        (1.49, ">= 1.5", True),
        (math.nan, "<= 0.8", True),
        (math.inf, ">= 1.5", True),
        (9.0, None, False),
    ],
)
def test_a_goal_is_missed_by_its_bound_or_by_no_value(
    value: float, goal: str | None, is_missed: bool
) -> None:
    """Bounds are inclusive; what was not measured misses its goal."""
    assert figure("x", value, "x", goal).is_missed is is_missed


def test_last_line_is_one_json_object() -> None:
    """bench, figures, goals and missed, in one line."""
    line = run(
        figure("a", 0.9, "a", "<= 0.8"), figure("b", 2.0, "b"), figure("c", math.nan, "c", ">= 1.0")
    ).last_line()
    assert "\n" not in line
    assert msgspec.json.decode(line) == {
        "bench": "engine",
        "figures": {"a": 0.9, "b": 2.0, "c": None},
        "goals": {"a": "<= 0.8", "c": ">= 1.0"},
        "missed": ["a", "c"],
    }


def test_full_runs_are_kept_and_quick_ones_are_not(tmp_path: Path) -> None:
    """A quick run never overwrites a full one."""
    kept, other = run(figure("a", 1.0, "a")), run(figure("a", 9.0, "a"))
    assert store(kept, is_full=True, folder=tmp_path).name == "engine.json"
    assert store(other, is_full=False, folder=tmp_path).name == "engine.tmp"
    assert stored(tmp_path) == [kept]


def test_values_are_rounded_to_significant_digits() -> None:
    """Four digits by default, and no NaN in JSON."""
    assert rounded(123456.7) == 123500.0
    assert rounded(0.00123456) == 0.001235
    assert rounded(math.nan) is None


def test_table_has_a_column_for_every_name_and_a_dash_for_what_is_missing() -> None:
    """Rows may have different columns."""
    assert table({"a": {"x": 1.5}, "b": {"y": 12000}}) == [
        "| | x | y |",
        "|---|---|---|",
        "| a | 1.5 | – |",
        "| b | – | 12,000 |",
    ]


def test_page_names_machine_date_figures_goals_and_medians() -> None:
    """A reader sees what was measured, on what, when, and whether it was good enough."""
    text = docs.page([run(figure("a", 0.9, "time", "<= 0.8"), figure("b", 2.0, "rate", ">= 1.5"))])
    assert "## engine" in text
    assert "2026-12-01, commit abc1234: Test CPU, 2 cores, 24 GiB" in text
    assert "| `a` | time | 0.9 | <= 0.8 | no |" in text
    assert "| `b` | rate | 2 | >= 1.5 | yes |" in text
    assert "Settings: threads 2." in text
    assert "| ours | 170.2 | – |" in text


def test_page_is_stale_until_it_is_written(tmp_path: Path) -> None:
    """Absent or differing is stale; written is not."""
    path = tmp_path / "benchmarks.md"
    runs = [run(figure("a", 1.0, "a"))]
    assert docs.is_stale(runs, path)
    docs.write(runs, path)
    assert not docs.is_stale(runs, path)
    assert docs.is_stale([*runs, run(bench="gateway")], path)


def test_machine_is_described() -> None:
    """CPU, cores, memory and versions of this machine are there."""
    machine = describe()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert machine.python.startswith("3.")
