"""docs/benchmarks.md, made from the stored runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.report import Run, Value, table

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

Written by `python -m bench docs` from bench/runs; do not edit. Every figure is a ratio of two things
measured in one run on one machine, in turns, as the median of several pairs; the peer runs in its
fastest mode. Repeat one with `python -m bench NAME` (`--quick` for a few minutes); `python -m bench peers
NAME` installs a peer.
"""


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(run) for run in runs)])


def _section(run: Run) -> str:
    machine = run.machine
    figures: dict[str, dict[str, Value]] = {
        f"`{f.name}`": {
            "what": f.meaning,
            "value": f.value,
            "goal": f.goal,
            "reached": None if f.goal is None else "no" if f.is_missed else "yes",
        }
        for f in run.figures
    }
    settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
    return "\n".join(
        [
            f"## {run.bench}",
            "",
            f"{run.date}, commit {machine.commit}: {machine.cpu}, {machine.cores} cores, "
            f"{machine.memory_gib:g} GiB, {machine.system}, Python {machine.python}, "
            f"llama-cpp-python {machine.llama_cpp_python}.",
            "",
            *table(figures),
            "",
            f"Settings: {settings}.",
            "",
            "Medians behind the ratios:",
            "",
            *table(run.raw),
            "",
        ]
    )


def write(runs: Sequence[Run], path: Path = PAGE) -> None:
    """Write the page."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(runs))


def is_stale(runs: Sequence[Run], path: Path = PAGE) -> bool:
    """Whether the page differs from what the runs would make."""
    return not path.is_file() or path.read_text() != page(runs)
