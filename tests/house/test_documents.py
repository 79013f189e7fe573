"""Documents tell the truth about files, commands and options."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripts.docs import DOCS, actions_of, pages

from antiphon.cli.main import COMMANDS, load
from antiphon.obs.metrics import GatewayMetrics, WorkerMetrics
from support.sources import ROOT, markdown_files, name_of

_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.\w+|[\w-]+\.(?:md|toml|cmake|py|lock|yaml|yml)|(?:[\w.-]+/)+")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_MAKE = re.compile(r"(?:^|&& )make ((?:[a-z]+ ?)+)")
_BASES = ("", "src/antiphon", "docs", "tests")


def _actions(name: str) -> list[argparse.Action]:
    """The options of a command and of its actions."""
    parser = load(name).parser()
    return [action for p in [parser, *actions_of(parser)] for action in p._actions]


def _exists(name: str, document: Path) -> bool:
    candidates = [document.parent / name, *(ROOT / base / name for base in _BASES)]
    return any(candidate.exists() for candidate in candidates)


@pytest.mark.parametrize("path", markdown_files(), ids=name_of)
def test_paths_that_are_named_exist(path: Path) -> None:
    """A path in backquotes or a relative link leads somewhere in this repository."""
    text = path.read_text("utf-8")
    spans = [span for span in _CODE.findall(text) if _PATH.fullmatch(span)]
    links = [link for link in _LINK.findall(text) if "://" not in link]
    assert [name for name in spans + links if not _exists(name, path)] == []


@pytest.mark.parametrize("path", markdown_files(), ids=name_of)
def test_make_verbs_that_are_named_exist(path: Path) -> None:
    """`make x` in a document is a verb of the Makefile."""
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in _CODE.findall(path.read_text("utf-8")) + re.findall(
        r"^make .*$", path.read_text("utf-8"), re.M
    ):
        for words in _MAKE.findall(line):
            assert set(words.split()) <= verbs, line


@pytest.mark.parametrize("path", markdown_files(), ids=name_of)
def test_commands_that_are_named_exist(path: Path) -> None:
    """`antiphon x` in a document is a command, and its options are options."""
    for span in _CODE.findall(path.read_text("utf-8")):
        words = span.split()
        if words[0] != "antiphon" or len(words) < 2 or words[1].startswith("-") or words[1].isupper():
            continue
        assert words[1] in COMMANDS, span
        known = {option for action in _actions(words[1]) for option in action.option_strings}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, span


def test_every_dependency_has_its_line() -> None:
    """docs/dependencies.md says of each package why it is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in wanted}
    lines = (ROOT / "docs" / "dependencies.md").read_text("utf-8").splitlines()
    rows = {line.split("|")[1].strip().strip("`") for line in lines if line.startswith("| `")}
    assert rows == names


@pytest.mark.parametrize("name", pages())
def test_generated_pages_are_current(name: str) -> None:
    """Pages made from code say what the code says; `make docs` writes them."""
    assert (DOCS / name).read_text("utf-8") == pages()[name]


@pytest.mark.parametrize("metrics", [GatewayMetrics, WorkerMetrics])
def test_every_metric_is_in_the_generated_page(metrics: type[GatewayMetrics] | type[WorkerMetrics]) -> None:
    """docs/metrics.md knows each one that a process shows, whichever part of the code declares it."""
    page = (DOCS / "metrics.md").read_text("utf-8")
    families = text_string_to_metric_families(metrics().render().decode())
    names = {family.name.removesuffix("_created") for family in families}
    assert {name for name in names if f"`{name}`" not in page and f"`{name}_total`" not in page} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_generated_page(name: str) -> None:
    """docs/config.md knows each option of each command."""
    page = (DOCS / "config.md").read_text("utf-8")
    section = page.partition(f"## antiphon {name}\n")[2].partition("\n## ")[0]
    options = {a.option_strings[-1] for a in _actions(name) if a.option_strings and a.dest != "help"}
    assert {option for option in options if f"| `{option}` |" not in section} == set()
