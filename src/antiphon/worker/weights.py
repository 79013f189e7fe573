"""Decides which weight file a worker serves, and makes it where that is faster than the one shipped.

The format of the weights decides more about speed on a CPU than anything else here does. So at the
first start the near-lossless formats are made and measured, and the fastest is kept in a cache
folder shared by all workers of the machine, with a record of what was found. The digest of the file
served names the KV namespace, so a fleet tunes once and pins it (`sha256:<digest>`).

`auto` never serves what a person did not ask for: a format that is not near-lossless (closeness.py)
is out, coarser formats are made only when named, and where tuning fails the source is served as it
is, with a warning. A named format or a pinned digest is served or refused.

One worker tunes, the others wait (a lock file); files appear by rename, whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import llama_cpp
import msgspec

from antiphon.core.errors import BadRequest, EngineFault
from antiphon.obs.log import Logger
from antiphon.tokens.modelfile import read_metadata
from antiphon.worker.trial import FORMATS, Measured, TrialEffort, TrialFailed, TrialOrder, run_in_child
from antiphon.worker.weightcache import Locked, LockTimeout, cpu_identity, room_for

Progress: TypeAlias = Callable[[str, float], None]

NEAR_LOSSLESS = ("Q8_0", "BF16")
FLOAT_SOURCES = ("F16", "F32")  # F16 is near-lossless for these too
MIN_GAIN = 1.03  # a new file must save at least this much time to be worth its disk
_LOCK_DEADLINE_S = 1800.0

# The work a format is judged by: one prompt, and an answer half alone and half in a full batch.
_PROMPT_TOKENS = 256
_ANSWER_TOKENS = 128


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A format that was measured."""

    format: str
    measured: Measured

    @property
    def seconds(self) -> float:
        """Time of a typical request: the score, less is better."""
        m = self.measured
        return (
            _PROMPT_TOKENS / m.prefill_tokens_per_s
            + _ANSWER_TOKENS / 2 / m.decode_tokens_per_s
            + _ANSWER_TOKENS / 2 / m.batch_tokens_per_s
        )


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a tuning, kept beside the file as JSON. `file` "" stands for the source."""

    source: str  # digest
    cpu: str
    llama_cpp: str
    format: str
    file: str
    digest: str
    tried: list[Tried]  # the source first
    left_out: dict[str, str] = {}  # format → why


@dataclass(frozen=True, slots=True)
class Weights:
    """The file to serve. `report` is the record of its tuning, None where nothing was measured."""

    path: Path
    format: str
    digest: str
    report: Tuning | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSetup:
    """What tuning works with. `folder` is the cache shared by the workers of this machine."""

    folder: Path
    threads: int
    progress: Progress
    log: Logger
    effort: TrialEffort = field(default_factory=TrialEffort)
    trial: Callable[[TrialOrder], Measured] = field(default=run_in_child)


def choose_weights(source: Path, wanted: str, setup: TuningSetup) -> Weights:
    """The weights to serve for `wanted`: as-is, auto, a format, or sha256:<digest>.

    Raises BadRequest for an unknown format or a pinned digest that is not here, EngineFault where a
    named format cannot be made.
    """
    setup.progress("reading the model file", 0.0)
    shipped = Weights(source, _format_of(source), _digest(source))
    if wanted.startswith("sha256:"):
        return _pinned(shipped, wanted.removeprefix("sha256:").lower(), setup.folder)
    if wanted in ("as-is", shipped.format):
        return shipped
    if wanted != "auto" and wanted not in FORMATS:
        raise BadRequest(
            f"--weights {wanted!r}: give auto, as-is, sha256:<digest> or one of {', '.join(FORMATS)}."
        )
    formats = _candidates(shipped.format) if wanted == "auto" else (wanted,)
    try:
        lock = setup.folder / f"{shipped.digest}.lock"
        with Locked(lock, "tuning the weights", _LOCK_DEADLINE_S, setup.progress):
            tuner = _Tuner(shipped, setup)
            return tuner.known(wanted) or tuner.tune(formats, keep=wanted)
    except (OSError, LockTimeout, TrialFailed) as error:
        if wanted != "auto":
            raise EngineFault(f"The weights cannot be had as {wanted}: {error}") from error
        setup.log.warning("weights.tuning_failed", reason=str(error), serving=shipped.format)
        return shipped


def pick(tried: list[Tried]) -> Tried:
    """The fastest near-lossless format; the source, which stands first, unless one is clearly faster."""
    source = tried[0]
    fastest = min((t for t in tried if t.measured.closeness.is_near_lossless), key=lambda t: t.seconds)
    return fastest if source.seconds >= MIN_GAIN * fastest.seconds else source


def _candidates(shipped: str) -> tuple[str, ...]:
    formats = (*NEAR_LOSSLESS, "F16") if shipped in FLOAT_SOURCES else NEAR_LOSSLESS
    return tuple(name for name in formats if name != shipped)


def _pinned(shipped: Weights, digest: str, folder: Path) -> Weights:
    """The file with this digest, which is computed anew. Raises BadRequest where there is none."""
    if shipped.digest == digest:
        return shipped
    for path in sorted(folder.glob(f"{shipped.digest}-*.gguf")):
        if _digest(path) == digest:
            return Weights(path, _format_of(path), digest)
    raise BadRequest(
        f"The weights pinned as sha256:{digest} are not here: neither {shipped.path.name} nor a file made of "
        f"it in {folder} has this digest. Copy the pinned file there, or start with --weights auto and pin "
        "what it reports."
    )


class _Tuner:
    """Makes, measures and keeps formats of one source. The caller holds the lock."""

    def __init__(self, shipped: Weights, setup: TuningSetup) -> None:
        self._shipped = shipped
        self._setup = setup
        self._version = llama_cpp.__version__
        self._cpu = cpu_identity()

    def known(self, wanted: str) -> Weights | None:
        """What an earlier tuning on this CPU type kept, if its file is still what it was."""
        try:
            tuning = msgspec.json.decode(self._record(wanted).read_bytes(), type=Tuning)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            self._setup.log.warning("weights.record_unreadable", file=self._record(wanted).name)
            return None
        if (tuning.cpu, tuning.llama_cpp) != (self._cpu, self._version):
            return None
        if not tuning.file:
            return Weights(self._shipped.path, tuning.format, self._shipped.digest, tuning)
        path = self._setup.folder / Path(tuning.file).name
        if not path.is_file() or _digest(path) != tuning.digest:
            return None
        return Weights(path, tuning.format, tuning.digest, tuning)

    def tune(self, formats: tuple[str, ...], keep: str) -> Weights:
        """Measure the source and `formats`; keep the best if `keep` is auto, else the format it names."""
        self._clear_scraps()
        try:
            tried, left_out = self._try_all(formats, is_named=keep != "auto")
            best = pick(tried) if keep == "auto" else tried[-1]
            return self._keep(best, tried, left_out, keep)
        finally:
            self._clear_scraps()

    def _try_all(self, formats: tuple[str, ...], is_named: bool) -> tuple[list[Tried], dict[str, str]]:
        """The source and every format that works. One that was named must work."""
        num_trials = 1 + len(formats)
        self._setup.progress(f"measuring the weights as shipped ({self._shipped.format})", 0.1)
        source = Tried(format=self._shipped.format, measured=self._trial(None))
        tried, left_out = [source], {}
        for i, name in enumerate(formats, start=1):
            self._setup.progress(f"making and measuring the weights as {name}", 0.1 + 0.8 * i / num_trials)
            try:
                room_for(name, source.measured.num_params, self._setup.folder)
                tried.append(Tried(format=name, measured=self._trial(name)))
            except (OSError, TrialFailed) as error:
                if is_named:
                    raise
                left_out[name] = str(error)
                self._part(name).unlink(missing_ok=True)
                self._setup.log.warning("weights.format_left_out", format=name, reason=str(error))
        return tried, left_out

    def _trial(self, name: str | None) -> Measured:
        return self._setup.trial(
            TrialOrder(
                source=str(self._shipped.path),
                format=name,
                output=str(self._part(name or "source")),
                reference=f"{self._part('logits')}.npy",
                threads=self._setup.threads,
                effort=self._setup.effort,
            )
        )

    def _keep(self, best: Tried, tried: list[Tried], left_out: dict[str, str], wanted: str) -> Weights:
        path, digest = self._shipped.path, self._shipped.digest
        if best is not tried[0]:
            path = self._setup.folder / f"{self._shipped.digest}-{best.format}-{self._version}.gguf"
            digest = _digest(self._part(best.format))
            self._part(best.format).replace(path)
        tuning = Tuning(
            source=self._shipped.digest,
            cpu=self._cpu,
            llama_cpp=self._version,
            format=best.format,
            file=path.name if best is not tried[0] else "",
            digest=digest,
            tried=tried,
            left_out=left_out,
        )
        part = self._part("record")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(tuning), indent=2))
        part.replace(self._record(wanted))
        gain = tried[0].seconds / best.seconds
        self._setup.log.info("weights.tuned", format=best.format, digest=digest, gain=round(gain, 2))
        return Weights(path, best.format, digest, tuning)

    def _part(self, what: str) -> Path:
        return self._setup.folder / f"{self._shipped.digest}-{what}.{os.getpid()}.part"

    def _record(self, wanted: str) -> Path:
        return self._setup.folder / f"{self._shipped.digest}.{wanted}.{self._cpu}.tuning.json"

    def _clear_scraps(self) -> None:
        """Remove unfinished files, also those of a tuning that was killed: we hold the lock."""
        for scrap in self._setup.folder.glob(f"{self._shipped.digest}-*.part*"):
            scrap.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _format_of(path: Path) -> str:
    """The format most of a file's weights are in, by llama.cpp's name for it."""
    file_type = read_metadata(path).file_type
    for name, number in vars(llama_cpp).items():
        if name.startswith("LLAMA_FTYPE_") and number == file_type:
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    return "unknown"
