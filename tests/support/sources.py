"""The repository's own files, as the house tests read them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_files(*folders: str) -> list[Path]:
    """Python files below these folders of the repository, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def markdown_files() -> list[Path]:
    """The repository's documents."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(path: Path) -> str:
    """A file's path within the repository."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text("utf-8"), name_of(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a file, nested ones too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def called(node: ast.Call) -> str:
    """The dotted name of what a call calls, as it is written."""
    return ast.unparse(node.func)
