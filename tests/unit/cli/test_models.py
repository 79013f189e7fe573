"""From --model and --catalogue to an entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.cli.models import find_model, find_own_model, read_catalogue, routed_models, upstream_keys
from antiphon.core.errors import AntiphonError, BadRequest, NotFound


def test_built_in_models_are_there() -> None:
    """The product's own catalogue is found inside the package."""
    assert {"smollm2", "scripted"} <= {entry.name for entry in read_catalogue(None).entries()}


def test_unknown_model_names_those_there_are() -> None:
    """A typing error is mended by reading the message."""
    with pytest.raises(NotFound, match=r"smollm3.*known: smollm2, scripted"):
        find_model("smollm3", None, None)


def test_alias_finds_the_entry() -> None:
    """Both names are good."""
    assert find_model("smollm2-135m-instruct", None, None).name == "smollm2"


def test_file_is_named_by_its_stem(tmp_path: Path) -> None:
    """A GGUF file on the command line needs no catalogue."""
    file = tmp_path / "My-Model.gguf"
    file.touch()
    entry = find_model(str(file), None, None)
    assert (entry.name, entry.file) == ("my-model", str(file))


def test_missing_file_is_said() -> None:
    """A path that leads nowhere is not looked up in the catalogue."""
    with pytest.raises(BadRequest, match="no such file"):
        find_model("./nowhere.gguf", None, None)


def test_context_replaces_the_entrys() -> None:
    """--context wins over the catalogue."""
    assert find_model("smollm2", None, 512).context == 512
    assert find_model("smollm2", None, None).context == 4096


def test_operators_file_adds_and_replaces(tmp_path: Path) -> None:
    """Entries of --catalogue stand beside the built-in ones and win over them."""
    file = tmp_path / "models.toml"
    file.write_text('[[model]]\nname="mine"\nfile="/m.gguf"\n[[model]]\nname="smollm2"\nfile="/s.gguf"\n')
    assert find_model("mine", file, None).file == "/m.gguf"
    assert find_model("smollm2", file, None).file == "/s.gguf"
    assert find_model("scripted", file, None).engine == "scripted"


@pytest.mark.parametrize("content", [b"\xff", b"[[model]]\nnam='x'", b"=", None])
def test_bad_catalogue_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Bytes that are no text, unknown fields, no TOML and no file at all are said."""
    file = tmp_path / "models.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(AntiphonError, match=r"catalogue|models\.toml"):
        read_catalogue(file)


UPSTREAMS = """
[[model]]
name = "far"
engine = "openai"
[model.upstream]
url = "http://h/v1"
api_key_env = "FAR_KEY"
[[model]]
name = "unused"
engine = "scripted"
[[route]]
name = "chat"
targets = [{model = "far"}]
fallback = ["smollm2-135m-instruct"]
"""


def test_nobody_here_computes_a_model_of_an_upstream(tmp_path: Path) -> None:
    """A worker that is told to says who can."""
    file = tmp_path / "models.toml"
    file.write_text(UPSTREAMS)
    assert find_own_model("unused", file, None).name == "unused"
    with pytest.raises(BadRequest, match="another server computes it"):
        find_own_model("far", file, None)


def test_a_gateway_serves_upstreams_and_what_routes_name(tmp_path: Path) -> None:
    """Each once, by alias too; the rest of the catalogue is not served unasked; keys are only those named."""
    file = tmp_path / "models.toml"
    file.write_text(UPSTREAMS)
    entries = routed_models(read_catalogue(file))
    assert [entry.name for entry in entries] == ["far", "smollm2"]
    assert routed_models(read_catalogue(None)) == []
    assert upstream_keys(entries, {"FAR_KEY": "k", "HOME": "/root"}) == {"FAR_KEY": "k"}
    assert upstream_keys(entries, {}) == {}
