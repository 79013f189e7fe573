"""models.toml: what is read, replaced and refused."""

from __future__ import annotations

import importlib.resources

import pytest

from antiphon.core.catalogue import Catalogue
from antiphon.core.errors import BadRequest, NotFound

TWO = """
[[model]]
name = "a"
file = "/models/a.gguf"
aliases = ["alias"]

[[model]]
name = "b"
package = "some-package"
context = 128
"""


def test_names_and_aliases_find_their_entry() -> None:
    """An alias is another name for the same entry, which is listed once."""
    catalogue = Catalogue.parse(TWO)
    assert catalogue.find("alias") is catalogue.find("a")
    assert [entry.name for entry in catalogue.entries()] == ["a", "b"]


def test_a_later_file_replaces_entries_by_name() -> None:
    """An operator can redefine a built-in model."""
    catalogue = Catalogue.parse(TWO, '[[model]]\nname = "a"\nfile = "/other.gguf"')
    assert catalogue.find("a").file == "/other.gguf"
    with pytest.raises(NotFound):
        catalogue.find("alias")


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The error helps: it says what there is."""
    with pytest.raises(NotFound, match=r"'c'.*known: a, b") as caught:
        Catalogue.parse(TWO).find("c")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[model]\n", "models.toml"),
        ('[[model]]\nname = "a"', "exactly one of 'file' and 'package'"),
        ('[[model]]\nname = "a"\nfile = "x"\npackage = "y"', "exactly one"),
        ('[[model]]\nname = "a"\nfile = "x"\ncontext = 10', "below 64"),
        ('[[model]]\nname = "a"\nfile = "x"\ntypo = 1', "typo"),
        ('[[model]]\nname = "a"\nfile = "x"\nengine = "abacus"', "abacus"),
        ('[[model]]\nname = "a"\nengine = "scripted"\nfile = "x"', "none of"),
        ('[[model]]\nname = "a"\nfile = "x"\naliases = ["a"]', "twice"),
        ("[[model]]\nname = 5", "Expected `str`"),
        ('[[model]]\nname = "a"\nengine = "scripted"\nkv_token_bytes = 8', "below 16"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(text: str, match: str) -> None:
    """Every mistake is one line that names it."""
    with pytest.raises(BadRequest, match=match):
        Catalogue.parse(text)


def test_the_built_in_catalogue_is_valid() -> None:
    """It names the demo model and the scripted one."""
    text = importlib.resources.files("antiphon").joinpath("models.toml").read_text("utf-8")
    assert {"smollm2", "scripted"} <= {entry.name for entry in Catalogue.parse(text).entries()}
