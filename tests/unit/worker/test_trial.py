"""worker.trial on the built-in model: real child processes, small measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import structlog

from antiphon.tokens.modelfile import read_metadata
from antiphon.worker.trial import TrialEffort, TrialFailed, TrialOrder, quantise, run_in_child
from antiphon.worker.weights import TuningSetup, Weights, choose_weights

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

QUICK = TrialEffort(seconds=0.01, text_tokens=64, timeout_s=60.0)
THREADS = 1


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TuningSetup:
    return TuningSetup(
        folder=tmp_path_factory.mktemp("weights"),
        threads=THREADS,
        progress=lambda text, fraction: None,
        log=structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()]),
        effort=QUICK,
    )


@pytest.fixture(scope="module")
def named(model_path: Path, setup: TuningSetup) -> Weights:
    """The built-in model as Q8_0, made and measured once for this module."""
    return choose_weights(model_path, "Q8_0", setup)


@pytest.fixture
def order(model_path: Path, tmp_path: Path) -> TrialOrder:
    return TrialOrder(
        source=str(model_path),
        format=None,
        output=str(tmp_path / "out.gguf"),
        reference=str(tmp_path / "logits.npy"),
        threads=THREADS,
        effort=QUICK,
    )


def test_a_format_is_made_and_measured(named: Weights, model_path: Path) -> None:
    """Q8_0 of the shipped model is a loadable file, close to it, with rates that can be true."""
    assert named.path != model_path
    assert read_metadata(named.path).architecture == read_metadata(model_path).architecture
    assert named.report is not None
    source, q8 = (tried.measured for tried in named.report.tried)
    assert [tried.format for tried in named.report.tried] == ["Q4_1", "Q8_0"]
    assert source.closeness.divergence == source.closeness.max_logit_change == 0.0
    assert 0.0 < q8.closeness.divergence < 0.02
    assert 0.0 < q8.closeness.mean_logit_change < q8.closeness.max_logit_change < 5.0
    assert 2.0 < source.closeness.perplexity < 200.0
    assert source.num_params == q8.num_params > 100_000_000
    for measured in (source, q8):
        speeds = (measured.prefill_tokens_per_s, measured.batch_tokens_per_s, measured.decode_tokens_per_s)
        assert min(speeds) > 0.0


def test_the_next_start_needs_no_trial(named: Weights, model_path: Path, setup: TuningSetup) -> None:
    """A second start, and one that pins the digest, serve the very file without a child process."""

    def no_trial(order: TrialOrder) -> object:
        raise AssertionError("a trial was run")

    again = replace(setup, trial=no_trial)
    assert choose_weights(model_path, "Q8_0", again) == named
    assert choose_weights(model_path, f"sha256:{named.digest}", again).path == named.path


def test_the_same_format_is_the_same_file_everywhere(
    named: Weights, model_path: Path, tmp_path: Path
) -> None:
    """Making a format twice gives the same bytes, so that a fleet may pin what one worker tuned."""
    again = tmp_path / "again.gguf"
    quantise(str(model_path), "Q8_0", str(again))
    assert again.read_bytes() == named.path.read_bytes()


def test_a_model_that_cannot_be_read_fails_with_words(order: TrialOrder, tmp_path: Path) -> None:
    """A file that is no model ends the child with a reason, and only the child."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(TrialFailed, match=r"broken\.gguf"):
        run_in_child(msgspec.structs.replace(order, source=str(broken)))


def test_a_file_that_cannot_be_written_fails_with_words(order: TrialOrder, tmp_path: Path) -> None:
    """Where llama.cpp cannot write the new file the message names the format and the likely reason."""
    nowhere = str(tmp_path / "no" / "such" / "folder.gguf")
    with pytest.raises(TrialFailed, match="as Q8_0: is the disk full"):
        run_in_child(msgspec.structs.replace(order, format="Q8_0", output=nowhere))


def test_a_trial_has_a_deadline(order: TrialOrder) -> None:
    """A child that is not done in time is ended."""
    hasty = msgspec.structs.replace(QUICK, timeout_s=0.01)
    with pytest.raises(TrialFailed, match="not done after"):
        run_in_child(msgspec.structs.replace(order, effort=hasty))
