"""`antiphon serve` as a user runs it: real processes, curl, signals, the openai SDK."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import openai
import psutil
import pytest
from tests.support.served import PATIENCE_S, SERVE, Served, serving, state_of_its_own

from antiphon.cli.serve import GRACE_S


def curl(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What a user types."""
    return subprocess.run(
        ["curl", "--silent", "--noproxy", "*", "--max-time", "30", *options, url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def say(served: Served, text: str) -> str | None:
    """The scripted model's answer, which is the question; None while nobody answers."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
    done = curl(
        f"{served.url}/v1/chat/completions",
        *("-H", "content-type: application/json", "-d", json.dumps(body)),
    )
    reply = json.loads(done.stdout or "{}")
    return reply["choices"][0]["message"]["content"] if "choices" in reply else None


def wait_until_said(served: Served, text: str) -> None:
    """Ask until there is an answer."""
    until = time.monotonic() + PATIENCE_S
    while say(served, text) != text:
        assert time.monotonic() < until, "nobody answers"
        time.sleep(0.05)


def wait_for_family(process: subprocess.Popen[str], size: int) -> list[psutil.Process]:
    """The process's children and theirs, once there are so many."""
    until = time.monotonic() + PATIENCE_S
    while True:
        family = psutil.Process(process.pid).children(recursive=True)
        if len(family) >= size:
            return family
        assert time.monotonic() < until, "no such family"
        time.sleep(0.02)


def wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert alive == []


class TestScripted:
    """With the model that says back what it was told."""

    def test_curl_gets_an_answer_and_sigterm_leaves_nothing(self) -> None:
        """After the ready line a plain curl is answered; after SIGTERM no process is left."""
        with serving("--model", "scripted", "--port", "0") as served:
            assert say(served, "Good morning!") == "Good morning!"
            family = served.children()
            assert len(family) == 2
            assert served.stop() == 0
            wait_until_gone(family)

    def test_killed_worker_comes_back(self) -> None:
        """kill -9 of the only worker: a new one serves behind the same gateway."""
        with serving("--model", "scripted", "--port", "0") as served:
            worker, gateway = served.child("worker"), served.child("gateway")
            worker.kill()
            wait_until_gone([worker])
            wait_until_said(served, "Still there?")
            assert served.child("worker").pid != worker.pid
            assert served.child("gateway").pid == gateway.pid
            assert served.stop() == 0

    def test_killed_gateway_comes_back_at_its_port(self) -> None:
        """kill -9 of the gateway: the URL answers again."""
        with serving("--model", "scripted", "--port", "0") as served:
            served.child("gateway").kill()
            wait_until_said(served, "Hello?")
            assert served.stop() == 0

    def test_two_workers_survive_the_loss_of_one(self) -> None:
        """With a second worker no request fails while the first is away."""
        with serving("--model", "scripted", "--port", "0", "--workers", "2") as served:
            served.child("worker-1").kill()
            wait_until_said(served, "one is enough")
            for number in range(5):
                assert say(served, f"again {number}") == f"again {number}"
            assert served.stop() == 0

    def test_death_of_serve_leaves_no_orphan(self) -> None:
        """Even SIGKILL of `antiphon serve` takes its processes with it."""
        with serving("--model", "scripted", "--port", "0") as served:
            family = served.children()
            served.process.kill()
            served.process.wait()
            wait_until_gone(family)

    def test_open_answer_is_finished_before_the_end(self, tmp_path: Path) -> None:
        """SIGTERM in the middle of an answer: the client gets all of it, then everything ends."""
        catalogue = tmp_path / "models.toml"
        catalogue.write_text('[[model]]\nname="slow"\nengine="scripted"\ncontext=512\nstep_s=0.01\n')
        with serving("--model", "slow", "--catalogue", str(catalogue), "--port", "0") as served:
            text = "All of this must arrive, slowly but surely. " * 3
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            stream = client.chat.completions.create(
                model="slow", messages=[{"role": "user", "content": text}], stream=True
            )
            first = next(iter(stream))
            assert first.choices
            served.process.send_signal(signal.SIGTERM)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert said == text
            assert served.process.wait(PATIENCE_S) == 0

    def test_second_signal_does_not_wait(self) -> None:
        """Who asks twice has no patience: a process that does not stop in order is ended at once."""
        with serving("--model", "scripted", "--port", "0") as served:
            family = served.children()
            served.child("gateway").suspend()
            served.process.send_signal(signal.SIGINT)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(GRACE_S / 2) == 0
            wait_until_gone(family)

    def test_secret_is_private_and_goes_with_the_process(self) -> None:
        """Only this user can read the secret between the processes, and it does not stay."""
        with serving("--model", "scripted", "--port", "0") as served:
            arguments = served.child("worker").cmdline()
            secret = Path(arguments[arguments.index("--secret-file") + 1])
            assert secret.stat().st_mode & 0o077 == 0
            assert secret.parent.stat().st_mode & 0o077 == 0
            assert secret.read_text() not in " ".join(arguments)
            assert served.stop() == 0
            assert not secret.parent.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "smollm3"], "no model 'smollm3'"),
        (["--model", "./nowhere.gguf"], "no such file"),
        (["--model", "scripted", "--host", "0.0.0.0"], "--behind-proxy"),
        (["--port", "99999"], "not a whole number"),
        (["--model", "scripted", "--host", "192.0.2.1", "--behind-proxy"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_one_line(options: list[str], words: str) -> None:
    """Wrong arguments end with exit code 2 and one line before anything is started."""
    done = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_port_in_use_is_one_line() -> None:
    """A taken port is said before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*SERVE, "--port", port], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert done.stderr.count("\n") == 1


def test_model_that_llama_cannot_load_ends_serve(tmp_path: Path, model_path: Path) -> None:
    """A file whose header is fine and whose tensors are missing: exit code 1, the reason, no process left."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model_path.read_bytes()[: 8 << 20])
    with state_of_its_own() as environ:
        done = subprocess.run(
            [*SERVE, "--model", str(broken), "--weights", "as-is", "--port", "0"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environ,
        )
    assert done.returncode == 1
    assert "could not load broken.gguf" in done.stderr
    assert "antiphon serve: worker-1 could not start" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_stop_while_weights_are_measured_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM during the long work of a first start ends that work, too."""
    with state_of_its_own() as environ:
        process = subprocess.Popen(
            [*SERVE, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"XDG_CACHE_HOME": str(tmp_path)},
        )
        assert process.stderr is not None
        with process.stderr:
            while "measuring" not in process.stderr.readline():
                assert process.poll() is None
            family = wait_for_family(process, 2)
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        wait_until_gone(family)


@pytest.mark.model
def test_real_model_through_the_openai_sdk() -> None:
    """The built-in model answers the SDK, streamed and whole, with the same greedy text."""
    with serving("--port", "0", "--weights", "as-is", "--context", "512") as served:
        client = openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        )
        assert [model.id for model in client.models.list()] == ["smollm2"]
        ask = {"role": "user", "content": "What is the capital of France? Answer in one word."}
        whole = client.chat.completions.create(
            model="smollm2", messages=[ask], temperature=0, max_completion_tokens=16
        )
        text = whole.choices[0].message.content
        assert text
        with client.chat.completions.stream(
            model="smollm2", messages=[ask], temperature=0, max_completion_tokens=16
        ) as stream:
            assert stream.get_final_completion().choices[0].message.content == text
        assert served.stop() == 0
