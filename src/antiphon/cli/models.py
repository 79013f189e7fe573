"""From what `--model` and `--catalogue` say to a catalogue entry.

Every error names what there is. Reads the catalogue files; model files are opened by those who
serve them.
"""

from __future__ import annotations

import importlib.resources
import os
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


def _find(model: str, catalogue: Path | None) -> ModelEntry:
    if not model.endswith(".gguf") and os.sep not in model:
        return read_catalogue(catalogue).find(model)
    path = Path(model).expanduser()
    if not path.is_file():
        raise BadRequest(f"--model {model}: there is no such file")
    return ModelEntry(name=path.stem.lower(), file=str(path.absolute()))
