"""The layer rule, as pyproject.toml has it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

from support.sources import ROOT, python_files, tree_of


def test_layers_hold() -> None:
    """import-linter finds no arrow that runs up."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_every_package_has_a_layer() -> None:
    """A new package must be given its place."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in contracts if c["type"] == "layers"]
    named = {name.strip() for line in layers for name in line.split("|")}
    packages = {f"antiphon.{path.parent.name}" for path in (ROOT / "src" / "antiphon").glob("*/__init__.py")}
    assert packages == named


def test_runners_are_named_where_engines_are_built() -> None:
    """Runners are chosen in build.py; trial.py measures weight files on the real one."""
    users = {
        path.name
        for path in python_files("src")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        and node.module in ("antiphon.engine.llama", "antiphon.engine.scripted")
    }
    assert users == {"build.py", "trial.py"}
