"""worker.weights: which file is served, by trials whose figures are given."""

from __future__ import annotations

import hashlib
import shutil
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import llama_cpp
import msgspec
import pytest
import structlog
from structlog.testing import LogCapture

from antiphon.core.errors import BadRequest, EngineFault
from antiphon.worker import weightcache, weights
from antiphon.worker.closeness import Closeness
from antiphon.worker.trial import Measured, TrialFailed, TrialOrder
from antiphon.worker.weights import Tried, Tuning, TuningSetup, Weights, choose_weights, pick

FILE_TYPES = {"F32": 0, "Q4_1": 3, "F16": 1, "Q8_0": 7, "BF16": 32, "Q4_0": 2, "Q6_K": 18}


def gguf(format_name: str) -> bytes:
    """The smallest GGUF file that names an architecture and a file type."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    pairs += text("general.file_type") + struct.pack("<II", 4, FILE_TYPES[format_name])
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pairs


def measured(speed: float, divergence: float = 0.002) -> Measured:
    """Figures of a format that is `speed` times as fast as the shipped one."""
    return Measured(
        prefill_tokens_per_s=100 * speed,
        decode_tokens_per_s=50 * speed,
        batch_tokens_per_s=100 * speed,
        closeness=Closeness(
            perplexity=10.0,
            perplexity_change=0.001,
            perplexity_error=0.001,
            divergence=divergence,
            mean_logit_change=0.01,
            max_logit_change=0.2,
        ),
        num_params=1_000_000,
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Workshop:
    """A source file, a cache folder, and trials that write small files and answer with given figures."""

    root: Path
    figures: dict[str | None, Measured | Exception]
    source: Path = field(init=False)
    folder: Path = field(init=False)
    trials: list[str | None] = field(default_factory=list)
    steps: list[tuple[str, float]] = field(default_factory=list)
    log: LogCapture = field(default_factory=LogCapture)

    def __post_init__(self) -> None:
        self.source, self.folder = self.root / "model.gguf", self.root / "cache" / "weights"
        self.source.write_bytes(gguf("Q4_1"))

    def trial(self, order: TrialOrder) -> Measured:
        self.trials.append(order.format)
        if order.format is None:
            Path(order.reference).write_bytes(b"logits")
        else:
            Path(order.output).write_bytes(gguf(order.format))
        figure = self.figures[order.format]
        if isinstance(figure, Exception):
            raise figure
        return figure

    def choose(self, wanted: str = "auto") -> Weights:
        """Choose weights anew; `trials` then holds those of this call."""
        self.trials.clear()
        setup = TuningSetup(
            folder=self.folder,
            threads=2,
            progress=lambda text, fraction: self.steps.append((text, fraction)),
            log=structlog.wrap_logger(None, processors=[self.log]),
            trial=self.trial,
        )
        return choose_weights(self.source, wanted, setup)

    def files(self, suffix: str = "") -> list[str]:
        return sorted(path.name for path in self.folder.glob(f"*{suffix}"))

    def warnings(self) -> list[str]:
        return [entry["event"] for entry in self.log.entries if entry["log_level"] == "warning"]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """Q8_0 gains a fifth, BF16 a half, the lossy Q4_0 most of all."""
    return Workshop(
        tmp_path,
        {
            None: measured(1.0),
            "Q8_0": measured(1.2),
            "BF16": measured(1.5),
            "F16": measured(1.1),
            "Q4_0": measured(3.0, divergence=0.25),
        },
    )


def test_as_is_serves_the_source_unmeasured(shop: Workshop) -> None:
    """as-is needs no cache folder and no trial."""
    assert shop.choose("as-is") == Weights(shop.source, "Q4_1", digest(shop.source))
    assert shop.choose("Q4_1") == Weights(shop.source, "Q4_1", digest(shop.source))
    assert shop.trials == []
    assert not shop.folder.exists()


def test_auto_keeps_the_fastest_and_deletes_the_rest(shop: Workshop) -> None:
    """Of all near-lossless formats one file stays, with its record; no loser, no scrap, no reference."""
    chosen = shop.choose()
    assert shop.trials == [None, "Q8_0", "BF16"]
    assert chosen.format == "BF16"
    assert chosen.path.read_bytes() == gguf("BF16")
    assert chosen.digest == digest(chosen.path)
    assert shop.files(".gguf") == [f"{digest(shop.source)}-BF16-{llama_cpp.__version__}.gguf"]
    assert len(shop.files(".tuning.json")) == 1
    assert len(shop.files()) == 3  # those two and the lock
    record = msgspec.json.decode((shop.folder / shop.files(".json")[0]).read_bytes(), type=Tuning)
    assert record == chosen.report
    assert [tried.format for tried in record.tried] == ["Q4_1", "Q8_0", "BF16"]


def test_the_next_start_is_instant(shop: Workshop) -> None:
    """A second start finds the record and measures nothing."""
    first = shop.choose()
    assert shop.choose() == first
    assert shop.trials == []


def test_a_source_that_is_fastest_is_remembered_too(shop: Workshop) -> None:
    """Where nothing beats the file as shipped, no file is kept and the next start is instant as well."""
    shop.figures |= {"Q8_0": measured(0.9), "BF16": measured(1.02)}
    first = shop.choose()
    assert (first.path, first.format, first.digest) == (shop.source, "Q4_1", digest(shop.source))
    assert shop.files(".gguf") == []
    assert shop.choose() == first
    assert shop.trials == []


def test_another_cpu_tunes_for_itself(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fastest on one CPU type says nothing about another; both records live side by side."""
    here = shop.choose()
    monkeypatch.setattr(weights, "cpu_identity", lambda: "fedcba9876543210")
    shop.figures["Q8_0"] = measured(2.0)
    assert shop.choose().format == "Q8_0"
    monkeypatch.undo()
    assert shop.choose() == here
    assert shop.trials == []


def test_another_llama_cpp_tunes_anew(shop: Workshop) -> None:
    """A record of another llama.cpp version does not count: its kernels and its files differ."""
    shop.choose()
    record = shop.folder / shop.files(".json")[0]
    record.write_text(record.read_text().replace(llama_cpp.__version__, "0.0.1"))
    shop.choose()
    assert shop.trials == [None, "Q8_0", "BF16"]


@pytest.mark.parametrize("harm", ["file", "record", "missing"])
def test_damage_is_repaired_by_tuning_anew(shop: Workshop, harm: str) -> None:
    """A tuned file or a record that is not what it was is never served."""
    first = shop.choose()
    if harm == "file":
        first.path.write_bytes(first.path.read_bytes() + b"\0")
    elif harm == "missing":
        first.path.unlink()
    else:
        (shop.folder / shop.files(".json")[0]).write_text("{")
    assert shop.choose() == first
    assert shop.trials == [None, "Q8_0", "BF16"]


@pytest.mark.parametrize(
    ("shipped", "tried"), [("F32", ["Q8_0", "BF16", "F16"]), ("F16", ["Q8_0", "BF16"]), ("Q8_0", ["BF16"])]
)
def test_candidates_depend_on_the_source(shop: Workshop, shipped: str, tried: list[str]) -> None:
    """Nothing is made in the format it has already, and F16 only of sources in floats."""
    shop.source.write_bytes(gguf(shipped))
    shop.choose()
    assert shop.trials == [None, *tried]


def test_scraps_of_a_killed_tuning_are_removed(shop: Workshop) -> None:
    """Half-written files of a process that died do not stay on the disk."""
    shop.folder.mkdir(parents=True)
    scrap = shop.folder / f"{digest(shop.source)}-Q8_0.999999.part"
    scrap.write_bytes(b"half")
    shop.choose()
    assert not scrap.exists()


def test_progress_runs_forward(shop: Workshop) -> None:
    """Fractions lie in 0 … 1 and never fall; each trial is announced by the format's name."""
    shop.choose()
    fractions = [fraction for _, fraction in shop.steps]
    assert fractions == sorted(fractions)
    assert 0.0 <= fractions[0] <= fractions[-1] <= 1.0
    for name in ("Q4_1", "Q8_0", "BF16"):
        assert any(name in text for text, _ in shop.steps)


def test_only_near_lossless_formats_can_win() -> None:
    """A faster format that is not near-lossless is out."""
    source = Tried(format="Q4_1", measured=measured(1.0, divergence=0.0))
    far, near = (Tried(format=name, measured=measured(2.0, kl)) for name, kl in (("A", 0.02), ("B", 0.009)))
    assert pick([source, far]) is source
    assert pick([source, far, near]) is near


def test_a_small_gain_is_not_worth_a_copy() -> None:
    """Under 3 % the source stays."""
    source = Tried(format="Q4_1", measured=measured(1.0))
    assert pick([source, Tried(format="Q8_0", measured=measured(1.02))]) is source


def test_the_score_weighs_prompt_and_answer() -> None:
    """256 prompt tokens, 64 answer tokens alone and 64 in a batch: seconds of each add up."""
    assert Tried(format="Q8_0", measured=measured(1.0)).seconds == pytest.approx(2.56 + 1.28 + 0.64)


def test_a_format_that_fails_is_left_out(shop: Workshop) -> None:
    """One candidate that cannot be made or dies costs only itself, and the record says why."""
    shop.figures["BF16"] = TrialFailed("the process ended with status -6")
    chosen = shop.choose()
    assert chosen.format == "Q8_0"
    assert chosen.report is not None
    assert chosen.report.left_out == {"BF16": "the process ended with status -6"}
    assert shop.warnings() == ["weights.format_left_out"]
    assert len(shop.files(".gguf")) == 1


def test_auto_serves_the_source_where_tuning_fails(shop: Workshop) -> None:
    """A tuning that cannot even measure the source is a warning, not the end of the start."""
    shop.figures[None] = TrialFailed("not done after 900 s")
    assert shop.choose() == Weights(shop.source, "Q4_1", digest(shop.source))
    assert shop.warnings() == ["weights.tuning_failed"]
    assert shop.files(".json") == []


def test_auto_serves_the_source_where_the_folder_cannot_be_written(shop: Workshop) -> None:
    """A cache path that is no folder is a warning for auto and an error for a named format."""
    shop.folder.parent.write_text("a file where the folder should be")
    assert shop.choose().path == shop.source
    assert shop.warnings() == ["weights.tuning_failed"]
    with pytest.raises(EngineFault, match="cannot be had as Q8_0"):
        shop.choose("Q8_0")


def test_a_full_disk_leaves_formats_out(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats there is no disk for are not even begun; named, they are an error with the figures."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    chosen = shop.choose()
    assert chosen.format == "Q8_0"
    assert shop.trials == [None, "Q8_0"]
    assert "needs 1 MiB of disk" in str(chosen.report and chosen.report.left_out["BF16"])
    with pytest.raises(EngineFault, match="BF16 needs 1 MiB of disk, 1 MiB are free"):
        shop.choose("BF16")


def test_too_little_memory_leaves_formats_out(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that would not fit into memory is not tried: measuring it would stall the machine."""
    monkeypatch.setattr(weightcache, "_available_memory_bytes", lambda: 2_500_000)
    assert shop.choose().format == "Q8_0"
    assert shop.trials == [None, "Q8_0"]


def test_a_named_format_is_served_whatever_it_measures(shop: Workshop) -> None:
    """A lossy format is made when a person names it, reported, and does not touch what auto found."""
    auto = shop.choose()
    named = shop.choose("Q4_0")
    assert shop.trials == [None, "Q4_0"]
    assert (named.format, named.path.read_bytes()) == ("Q4_0", gguf("Q4_0"))
    assert named.report is not None
    assert named.report.tried[-1].measured.closeness.divergence == 0.25
    assert shop.choose("Q4_0") == named
    assert shop.trials == []
    assert shop.choose() == auto


def test_a_named_format_that_fails_is_an_error(shop: Workshop) -> None:
    """Nobody gets other weights than those named."""
    shop.figures["Q4_0"] = TrialFailed("llama.cpp could not write the weights as Q4_0: is the disk full?")
    with pytest.raises(EngineFault, match=r"cannot be had as Q4_0.*disk full"):
        shop.choose("Q4_0")
    assert shop.files(".part") == []


def test_an_unknown_format_is_refused(shop: Workshop) -> None:
    """A misspelt format is answered with what there is."""
    with pytest.raises(BadRequest, match=r"give auto, as-is, sha256:<digest> or one of .*Q8_0"):
        shop.choose("q8")


def test_a_pinned_digest_is_found(shop: Workshop) -> None:
    """The digest of the source or of a file made of it, in any case of letters, is served unmeasured."""
    tuned = shop.choose()
    pinned = shop.choose(f"sha256:{tuned.digest.upper()}")
    assert (pinned.path, pinned.format, pinned.digest) == (tuned.path, "BF16", tuned.digest)
    assert shop.choose(f"sha256:{digest(shop.source)}").path == shop.source
    assert shop.trials == []


def test_a_pinned_digest_that_is_not_here_is_refused(shop: Workshop) -> None:
    """Neither an unknown digest nor a file that has changed since is ever served under a pin."""
    with pytest.raises(BadRequest, match="are not here"):
        shop.choose("sha256:" + 64 * "0")
    tuned = shop.choose()
    tuned.path.write_bytes(gguf("BF16") + b"\0")
    with pytest.raises(BadRequest, match="are not here"):
        shop.choose(f"sha256:{tuned.digest}")


def test_workers_that_start_together_tune_once(shop: Workshop) -> None:
    """Of four starts at the same moment one measures and three wait for its record."""
    ready = threading.Barrier(4)
    found: list[Weights] = []
    began: list[str | None] = []

    def start() -> None:
        setup = TuningSetup(
            folder=shop.folder,
            threads=2,
            progress=lambda text, fraction: None,
            log=structlog.wrap_logger(None, processors=[shop.log]),
            trial=lambda order: (began.append(order.format), shop.trial(order))[1],
        )
        ready.wait()
        found.append(choose_weights(shop.source, "auto", setup))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert began == [None, "Q8_0", "BF16"]
    assert len(found) == 4
    assert len({weights.digest for weights in found}) == 1
