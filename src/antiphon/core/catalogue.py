"""The model catalogue: which models there are, from where, and how they are served.

Owns the shape and the checks of `models.toml`. The product's own file (antiphon/models.toml) names
the built-in models; an operator's file adds to it or replaces entries by name. Reads TOML text,
opens no model file: `tokens.modelfile` finds and checks those.
"""

from __future__ import annotations

import tomllib
from typing import Literal

import msgspec

from antiphon.core.errors import BadRequest, NotFound


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. Exactly one of `file` and `package` says where its weights are.

    Engine "scripted" has no weights: `script` names what it says (engine/scripted.py), `step_s` how
    long each step takes, `prefill_token_s` how much longer for each token of a prompt, `decode_row_s` for
    each answer in it; `kv_token_bytes` is how much KV a token has. After `fault_after` answer tokens every
    step fails, after `die_after` the engine breaks for good.
    """

    name: str
    engine: Literal["llama.cpp", "scripted"] = "llama.cpp"
    file: str | None = None  # path of a GGUF file
    package: str | None = None  # installed distribution whose files hold a GGUF
    context: int | None = None  # tokens a sequence may have; None: the model's own, at most 4096
    aliases: tuple[str, ...] = ()
    script: Literal["echo", "babble", "noise"] = "echo"
    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0
    kv_token_bytes: int = 16  # what the script needs of them; more is padding
    fault_after: int | None = None
    die_after: int | None = None

    def __post_init__(self) -> None:
        num_sources = (self.file is not None) + (self.package is not None)
        if num_sources != (self.engine != "scripted"):
            raise ValueError(f"model {self.name!r}: give exactly one of 'file' and 'package'")
        if self.kv_token_bytes < 16:
            raise ValueError(f"model {self.name!r}: kv_token_bytes {self.kv_token_bytes} is below 16")
        if self.context is not None and self.context < 64:
            raise ValueError(f"model {self.name!r}: context {self.context} is below 64 tokens")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: list[ModelEntry] = []


class Catalogue:
    """Model entries by name and alias."""

    def __init__(self, entries: list[ModelEntry]) -> None:
        self._entries: dict[str, ModelEntry] = {}
        for entry in entries:
            for name in (entry.name, *entry.aliases):
                if name in self._entries:
                    raise BadRequest(f"models.toml: the name {name!r} stands twice")
                self._entries[name] = entry

    @classmethod
    def parse(cls, *texts: str) -> Catalogue:
        """Read catalogue texts in order; a later entry replaces an earlier one of its name."""
        entries: dict[str, ModelEntry] = {}
        for text in texts:
            try:
                parsed = msgspec.convert(tomllib.loads(text), _File)
            except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
                raise BadRequest(f"models.toml: {error}") from error
            entries.update({entry.name: entry for entry in parsed.model})
        return cls(list(entries.values()))

    def entries(self) -> list[ModelEntry]:
        """All models, each once, in the file's order."""
        return list(dict.fromkeys(self._entries.values()))

    def find(self, name: str) -> ModelEntry:
        """The entry of this name or alias. Raises NotFound naming the ones there are."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(e.name for e in self.entries()) or "none"
            raise NotFound(
                f"There is no model {name!r} in the catalogue (known: {known}).",
                code="model_not_found",
                param="model",
            )
        return entry
