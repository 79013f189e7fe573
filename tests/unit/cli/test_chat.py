"""The chat command, at a real terminal and with a pipe."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from support.chatserver import ChatServer, says, serving

CHAT = (sys.executable, "-m", "antiphon.cli.main", "chat", "--url")


def _ask(chat: ChatServer, question: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*CHAT, chat.url, *options], input=question, capture_output=True, timeout=30)


def test_piped_question_is_answered_on_stdout() -> None:
    """One question in, its answer and nothing else out."""
    with serving(ChatServer(chunks=says("For", "ty-two"))) as chat:
        done = _ask(chat, b"What is\nsix times seven?\n", "--system", "S", "--temperature", "0")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"Forty-two\n", b"")
        assert chat.requests[0]["messages"] == [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "What is\nsix times seven?"},
        ]


def test_escape_sequences_of_a_model_are_shown() -> None:
    """The model's text cannot steer the terminal, not even cut in two."""
    with serving(ChatServer(chunks=says("a\x1b", "]0;x\x07"))) as chat:
        assert _ask(chat, b"hi").stdout.decode() == "a␛]0;x␇\n"


def test_bytes_that_are_no_text_can_be_asked() -> None:
    """Bad UTF-8 on stdin reaches the server as replacement characters."""
    with serving(ChatServer(chunks=says("x"))) as chat:
        assert _ask(chat, b"a\xffb").returncode == 0
        assert chat.requests[0]["messages"] == [{"role": "user", "content": "a\ufffdb"}]


def test_refusal_of_a_piped_question_is_exit_code_1() -> None:
    """A script sees that there is no answer, and why."""
    with serving(ChatServer(status=400, chunks=[b'{"error":{"message":"Too\\u001b long."}}'])) as chat:
        done = _ask(chat, b"hi")
        assert done.returncode == 1
        assert "Too␛ long." in done.stderr.decode()


@pytest.mark.parametrize("question", [b"", b" \n\t\n"])
def test_no_question_is_a_bad_call(question: bytes) -> None:
    """Nothing on stdin sends nothing."""
    with serving(ChatServer(chunks=says("x"))) as chat:
        assert _ask(chat, question).returncode == 2
        assert chat.requests == []


@pytest.mark.parametrize("value", ["hot", "nan", "-0.1", "2.1", "inf"])
def test_bad_temperature_is_a_bad_call(value: str) -> None:
    """Only numbers from 0 to 2 are temperatures."""
    done = subprocess.run(
        [*CHAT, "http://127.0.0.1:1", f"--temperature={value}"], capture_output=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


class Terminal:
    """The user's side of a chat in a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str) -> str:
        """Everything shown up to and with this text; waits for it."""
        wanted = text.encode()
        while wanted not in self._seen:
            self._seen += os.read(self._end, 2**16)
        shown, _, self._seen = self._seen.partition(wanted)
        return (shown + wanted).decode()


@contextmanager
def terminal(chat: ChatServer) -> Iterator[Terminal]:
    """A chat that runs in a terminal inside the block."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"TERM": "dumb"}
    process = subprocess.Popen(
        [*CHAT, chat.url], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environ
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_talk_in_a_terminal() -> None:
    """Questions are answered in turn, commands are obeyed, /exit leaves."""
    with serving(ChatServer(chunks=says("answer"))) as chat, terminal(chat) as user:
        assert "Talking to scripted" in user.wait_for("> ")
        user.type("one\n")
        user.wait_for("answer")
        user.wait_for("> ")
        user.type("two\n")
        user.wait_for("answer")
        user.wait_for("> ")
        assert [m["content"] for m in chat.requests[1]["messages"]] == ["one", "answer", "two"]
        user.type("/system Be brief.\n")
        user.wait_for("Begun anew with this system prompt.")
        user.wait_for("> ")
        user.type("three\n")
        user.wait_for("answer")
        user.wait_for("> ")
        assert [m["content"] for m in chat.requests[2]["messages"]] == ["Be brief.", "three"]
        user.type("/clear\n")
        user.wait_for("Begun anew.")
        user.wait_for("> ")
        user.type("/nope\n")
        user.wait_for("There is no command /nope.")
        user.wait_for("> ")
        user.type("/help\n")
        user.wait_for("Ctrl-C stops an answer.")
        user.wait_for("> ")
        user.type("/exit\n")
        assert user.process.wait(20) == 0


def test_ctrl_c_stops_an_answer_then_leaves() -> None:
    """The first Ctrl-C closes the connection and keeps what was said, the next one at the prompt leaves."""
    chat = ChatServer(chunks=says("on and on")[:-1], is_endless=True)
    with serving(chat), terminal(chat) as user:
        user.wait_for("> ")
        user.type("go\n")
        user.wait_for("on and on")
        user.process.send_signal(signal.SIGINT)
        user.wait_for("[stopped]")
        assert chat.client_left.wait(20)
        chat.is_endless, chat.chunks = False, says("fresh")
        user.wait_for("> ")
        user.type("next\n")
        user.wait_for("fresh")
        said = [m["content"] for m in chat.requests[1]["messages"]]
        assert (said[0], said[2]) == ("go", "next")
        assert said[1].startswith("on and on")
        user.wait_for("> ")
        assert leave_by_ctrl_c(user.process) == 0


def leave_by_ctrl_c(process: subprocess.Popen[bytes]) -> int:
    """Press Ctrl-C like a person: again if nothing happens. readline does not see a signal that comes
    between its prompt and its wait for a key."""
    for _ in range(20):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)
    raise AssertionError("Ctrl-C does not leave")


def test_ctrl_d_leaves() -> None:
    """The end of input is a way out."""
    with serving(ChatServer()) as chat, terminal(chat) as user:
        user.wait_for("> ")
        user.type("\x04")
        assert user.process.wait(20) == 0


def test_refusal_does_not_end_the_talk() -> None:
    """After an error the prompt is there again."""
    with serving(ChatServer(status=503, chunks=[b""])) as chat, terminal(chat) as user:
        user.wait_for("> ")
        user.type("hi\n")
        user.wait_for("the server answered 503")
        user.wait_for("> ")
        assert user.process.poll() is None
