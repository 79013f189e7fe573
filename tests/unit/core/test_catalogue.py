"""models.toml: what is read, replaced and refused."""

from __future__ import annotations

import importlib.resources
import re

import pytest

from antiphon.core.catalogue import Catalogue
from antiphon.core.errors import BadRequest, NotFound
from support.sources import ROOT

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

FAR = """
[[model]]
name = "far"
engine = "openai"
[model.upstream]
url = "http://h/v1"
"""
BAD_URLS = ("h:80/v1", "ftp://h/v1", "http://", "http://u:p@h/v1", "http://h/v1?key=x", "http://h:99999/v1")
ROUTED = (
    FAR
    + """
[[model]]
name = "spare"
engine = "scripted"
[[route]]
name = "chat"
aliases = ["gpt"]
targets = [{model = "far", weight = 9}, {model = "spare"}]
fallback = ["spare"]
mirror = {model = "far", share = 0.5}
"""
)


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
        ('[[model]]\nname = "a"\nengine = "openai"', "go together"),
        ('[[model]]\nname = "a"\nfile = "x"\nupstream = {url = "http://h/v1"}', "go together"),
        (FAR.replace("openai", 'openai"\nfile = "x'), "none of"),
        (FAR + 'by = "vllm-ids"', "exactly one"),
        (FAR + 'by = "carrier-pigeon"', "carrier-pigeon"),
        (FAR + "max_in_flight = 0", "max_in_flight"),
        (FAR + "connect_timeout_s = 0", "connect_timeout_s"),
        (FAR + 'api_key = "sk-secret"', "api_key"),
        *((FAR.replace("http://h/v1", url), "url") for url in BAD_URLS),
        (ROUTED.replace('"far", weight', '"near", weight'), "names 'near', which is no model"),
        (ROUTED.replace('name = "chat"', 'name = "far"'), "twice"),
        (ROUTED.replace("weight = 9", "weight = 0"), "weight"),
        (ROUTED + "\ntargets = []", "models.toml"),
        (ROUTED.replace('fallback = ["spare"]', 'fallback = ["chat"]'), "is no model"),
        (ROUTED.replace('{model = "spare"}', '{model = "far"}'), "target stands twice"),
        (ROUTED.replace("share = 0.5", "share = 1.5"), "share"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(text: str, match: str) -> None:
    """Every mistake is one line that names it."""
    with pytest.raises(BadRequest, match=match):
        Catalogue.parse(text)


def test_upstreams_and_routes() -> None:
    """What is left out has a default that works; a route lists every model it names."""
    catalogue = Catalogue.parse(ROUTED)
    upstream = catalogue.find("far").upstream
    assert upstream is not None
    assert (upstream.by, upstream.takes_ids, upstream.salts, upstream.api_key_env) == (
        "messages",
        False,
        True,
        None,
    )
    (route,) = catalogue.routes
    assert [(target.model, target.weight) for target in route.targets] == [("far", 9.0), ("spare", 1.0)]
    assert set(route.models) == {"far", "spare"}
    assert Catalogue.parse(ROUTED, '[[route]]\nname = "chat"\ntargets = [{model = "far"}]').routes[0] != route


def test_the_built_in_catalogue_is_valid() -> None:
    """It names the demo model and the scripted one."""
    text = importlib.resources.files("antiphon").joinpath("models.toml").read_text("utf-8")
    assert {"smollm2", "scripted"} <= {entry.name for entry in Catalogue.parse(text).entries()}


def test_the_examples_of_the_documentation_are_valid() -> None:
    """Every TOML block of docs/upstreams.md can be copied as it stands."""
    built_in = importlib.resources.files("antiphon").joinpath("models.toml").read_text("utf-8")
    blocks = re.findall(
        r"^```toml\n(.*?)^```", (ROOT / "docs" / "upstreams.md").read_text("utf-8"), re.M | re.S
    )
    assert len(blocks) >= 8
    for block in blocks:
        catalogue = Catalogue.parse(built_in, block)
        assert any(entry.upstream is not None for entry in catalogue.entries())
