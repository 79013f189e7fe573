"""The model catalogue: which models there are, from where, and how they are served.

Owns the shape and the checks of `models.toml`. The product's own file (antiphon/models.toml) names
the built-in models; an operator's file adds to it or replaces entries by name. A route is a public
name in front of models: shares, fallbacks, a mirror. Reads TOML text, opens no model file:
`tokens.modelfile` finds and checks those. Holds no key: an entry names the variable that does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from antiphon.core.errors import BadRequest, NotFound
from antiphon.core.price import PriceEntry

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class UpstreamEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that computes a model for us. `url` is what its clients call the base URL, with `/v1`.

    `by`: what it is sent. "messages": chats, to its /chat/completions. "vllm-ids" and "llama-server-ids":
    token ids, to vLLM's /completions or llama-server's /completion; text and ids are turned into each
    other here, by the entry's own `file` or `package`.
    """

    url: str
    model: str | None = None  # its name there; None: as here
    api_key_env: str | None = None  # environment variable that holds the key
    by: Literal["messages", "vllm-ids", "llama-server-ids"] = "messages"
    salts: bool = (
        True  # say whose request it is by a secret `cache_salt`, so that it shares no KV among tenants
    )
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 128  # requests there at once
    connect_timeout_s: Seconds = 5.0
    first_token_timeout_s: Seconds = 120.0
    silence_timeout_s: Seconds = 60.0  # between two tokens

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            is_good = False
        if not is_good or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise ValueError(
                "an upstream's url is http(s)://HOST[:PORT]/PATH, most often with /v1 at its end"
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError("an upstream's url holds no name and no password: use 'api_key_env'")

    @property
    def takes_ids(self) -> bool:
        """Whether it is sent token ids."""
        return self.by != "messages"


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. Exactly one of `file` and `package` says where its weights are.

    Engine "openai" is an upstream: another server computes it; a file, where ids are exchanged, serves for
    vocabulary and chat template only. `public` false: not listed, and only routes may name it. `price`: what
    its tokens cost; None: nothing.

    Engine "scripted" has no weights: `script` names what it says (engine/scripted.py), `step_s` how
    long each step takes, `prefill_token_s` how much longer for each token of a prompt, `decode_row_s` for
    each answer in it; `kv_token_bytes` is how much KV a token has. After `fault_after` answer tokens every
    step fails, after `die_after`, or where a prompt or answer holds `die_on`, the engine breaks for good.
    """

    name: str
    engine: Literal["llama.cpp", "scripted", "openai"] = "llama.cpp"
    file: str | None = None  # path of a GGUF file
    package: str | None = None  # installed distribution whose files hold a GGUF
    context: int | None = None  # tokens a sequence may have; None: the model's own, at most 4096
    aliases: tuple[str, ...] = ()
    public: bool = True
    upstream: UpstreamEntry | None = None
    price: PriceEntry | None = None
    script: Literal["echo", "babble", "noise"] = "echo"
    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0
    kv_token_bytes: int = 16  # what the script needs of them; more is padding
    fault_after: int | None = None
    die_after: int | None = None
    die_on: str | None = None

    def __post_init__(self) -> None:
        if (self.engine == "openai") != (self.upstream is not None):
            raise ValueError(f"model {self.name!r}: engine 'openai' and a table [model.upstream] go together")
        num_sources = (self.file is not None) + (self.package is not None)
        if num_sources != self._has_vocabulary:
            how = "exactly one of" if self._has_vocabulary else "none of"
            raise ValueError(f"model {self.name!r}: give {how} 'file' and 'package'")
        if self.kv_token_bytes < 16:
            raise ValueError(f"model {self.name!r}: kv_token_bytes {self.kv_token_bytes} is below 16")
        if self.context is not None and self.context < 64:
            raise ValueError(f"model {self.name!r}: context {self.context} is below 64 tokens")

    @property
    def _has_vocabulary(self) -> bool:
        return self.engine == "llama.cpp" or (self.upstream is not None and self.upstream.takes_ids)


class TargetEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that takes a share of a route's requests, in proportion to its weight."""

    model: str
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0


class MirrorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is sent copies of a share of a route's requests; its answers are thrown away."""

    model: str
    share: Share = 1.0


class RouteEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public name in front of models. `fallback`: models tried in order where no target has room."""

    name: str
    targets: Annotated[tuple[TargetEntry, ...], msgspec.Meta(min_length=1)]
    aliases: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    mirror: MirrorEntry | None = None

    def __post_init__(self) -> None:
        named = [target.model for target in self.targets]
        if len(set(named)) != len(named):
            raise ValueError(f"route {self.name!r}: a target stands twice")

    @property
    def models(self) -> tuple[str, ...]:
        """Every model it names."""
        mirror = () if self.mirror is None else (self.mirror.model,)
        return (*(target.model for target in self.targets), *self.fallback, *mirror)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: list[ModelEntry] = []
    route: list[RouteEntry] = []


class Catalogue:
    """Model entries by name and alias, and the routes in front of them."""

    def __init__(self, entries: list[ModelEntry], routes: Sequence[RouteEntry] = ()) -> None:
        self._entries: dict[str, ModelEntry] = {}
        for entry in entries:
            for name in (entry.name, *entry.aliases):
                if name in self._entries:
                    raise BadRequest(f"models.toml: the name {name!r} stands twice")
                self._entries[name] = entry
        self.routes = tuple(routes)
        taken = set(self._entries)
        for route in routes:
            for name in (route.name, *route.aliases):
                if name in taken:
                    raise BadRequest(f"models.toml: the name {name!r} stands twice")
                taken.add(name)
            for model in route.models:
                if model not in self._entries:
                    raise BadRequest(f"models.toml: route {route.name!r} names {model!r}, which is no model")

    @classmethod
    def parse(cls, *texts: str) -> Catalogue:
        """Read catalogue texts in order; a later entry replaces an earlier one of its name."""
        entries: dict[str, ModelEntry] = {}
        routes: dict[str, RouteEntry] = {}
        for text in texts:
            try:
                parsed = msgspec.convert(tomllib.loads(text), _File)
            except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
                raise BadRequest(f"models.toml: {error}") from error
            entries.update({entry.name: entry for entry in parsed.model})
            routes.update({route.name: route for route in parsed.route})
        return cls(list(entries.values()), list(routes.values()))

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
