"""From what `--model` and `--catalogue` say to a catalogue entry.

Every error names what there is. Reads the catalogue files; model files are opened by those who
serve them.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from antiphon.core.catalogue import Catalogue, ModelEntry
from antiphon.core.errors import BadRequest


def read_catalogue(file: Path | None) -> Catalogue:
    """The built-in models and, over them, those of an operator's file. Raises BadRequest."""
    texts = [importlib.resources.files("antiphon").joinpath("models.toml").read_text("utf-8")]
    if file is not None:
        try:
            texts.append(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise BadRequest(f"--catalogue {file}: {reason}") from error
    return Catalogue.parse(*texts)


def find_model(model: str, catalogue: Path | None, context: int | None) -> ModelEntry:
    """The entry of a name, or one for a GGUF file, whose stem names it. Raises NotFound or BadRequest.

    `context` replaces the entry's own where it is given.
    """
    entry = _find(model, catalogue)
    return entry if context is None else msgspec.structs.replace(entry, context=context)


def find_own_model(model: str, catalogue: Path | None, context: int | None) -> ModelEntry:
    """As `find_model`, for who computes it. Raises BadRequest for a model of an upstream, too."""
    entry = find_model(model, catalogue, context)
    if entry.upstream is not None:
        raise BadRequest(
            f"--model {model}: another server computes it; a gateway whose --catalogue holds it asks there"
        )
    return entry


def routed_models(catalogue: Catalogue) -> list[ModelEntry]:
    """The entries that a gateway serves without being told: upstreams, and what routes name."""
    names = [name for route in catalogue.routes for name in route.models]
    upstreams = [entry for entry in catalogue.entries() if entry.upstream is not None]
    return list(dict.fromkeys([*upstreams, *map(catalogue.find, names)]))


def upstream_keys(entries: Iterable[ModelEntry], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that entries name, where they are set."""
    names = {entry.upstream.api_key_env for entry in entries if entry.upstream is not None}
    return {name: environ[name] for name in names if name is not None and name in environ}


def _find(model: str, catalogue: Path | None) -> ModelEntry:
    if not model.endswith(".gguf") and os.sep not in model:
        return read_catalogue(catalogue).find(model)
    path = Path(model).expanduser()
    if not path.is_file():
        raise BadRequest(f"--model {model}: there is no such file")
    return ModelEntry(name=path.stem.lower(), file=str(path.absolute()))
