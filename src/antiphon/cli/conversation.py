"""A conversation over POST /v1/chat/completions, streamed.

Owns the messages so far and the connection. Invariants: messages alternate between user and
assistant; a question that was refused leaves no trace; leaving `ask` early closes the connection,
which aborts the answer on the server. Knows no terminal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import msgspec

from antiphon.core.errors import BadRequest
from antiphon.net.certificate import trusting

_CONNECT_TIMEOUT_S = 5.0
_SILENCE_S = 120.0  # the server speaks every few seconds, keep-alive comments included
_MAX_EVENT_BYTES = 2**20


class Refusal(Exception):
    """The server did not answer, or stopped answering; the text says why."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Event(msgspec.Struct, frozen=True):
    """A chunk of an answer, or an error; as a whole body, only an error."""

    choices: list[_Choice] = []
    error: _Error | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Card]


class Conversation:
    """What was said so far, and with whom."""

    def __init__(
        self, url: str, temperature: float | None, key: str | None = None, ca: Path | None = None
    ) -> None:
        """`ca`: PEM file of who vouches for the server; None: the system's authorities. Raises BadRequest."""
        self.model = ""
        self.system: str | None = None
        self._url = url.rstrip("/").removesuffix("/v1")
        self._temperature = temperature
        self._turns: list[dict[str, str]] = []
        if not self._url.startswith(("http://", "https://")):
            raise BadRequest(f"--url {url}: write http://HOST:PORT")
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise BadRequest("the key is none: keys are printable ASCII characters without spaces")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(_SILENCE_S, connect=_CONNECT_TIMEOUT_S)
        try:
            # No proxy of the environment: what is said to a server on this machine stays on it.
            self._client = httpx2.Client(
                base_url=self._url,
                timeout=timeout,
                headers=headers,
                trust_env=False,
                verify=trusting(ca),
            )
        except httpx2.InvalidURL as error:
            raise BadRequest(f"--url {url}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def choose_model(self, name: str | None) -> None:
        """Talk to this model, or to the server's first. Raises BadRequest where that cannot be."""
        try:
            response = self._client.get("/v1/models")
            response.raise_for_status()
            names = [card.id for card in msgspec.json.decode(response.content, type=_Models).data]
        except httpx2.HTTPStatusError as error:
            if error.response.status_code == 401:
                raise BadRequest(f"{self._url} wants a good key: set ANTIPHON_API_KEY") from error
            raise BadRequest(f"{self._url} answered {error.response.status_code}: is it Antiphon?") from error
        except msgspec.DecodeError as error:
            raise BadRequest(f"{self._url} does not speak OpenAI's API") from error
        except httpx2.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise BadRequest(f"nobody vouches for the certificate of {self._url}: see --ca") from error
            raise BadRequest(f"nobody serves at {self._url}. Start it with: antiphon serve") from error
        if not names:
            raise BadRequest(f"{self._url} serves no model")
        self.model = name if name is not None else names[0]

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self._turns.clear()

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer piece by piece. Raises Refusal."""
        self._turns.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            with contextlib.closing(self._stream()) as pieces:
                for text in pieces:
                    answer.append(text)
                    yield text
        finally:
            if answer:
                self._turns.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._turns.pop()

    def _stream(self) -> Generator[str, None, None]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body: dict[str, object] = {"model": self.model, "messages": system + self._turns, "stream": True}
        if self._temperature is not None:
            body["temperature"] = self._temperature
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise Refusal(_reason(response.status_code, response.read()))
                for event in _events(response.iter_bytes()):
                    if event.error is not None:
                        raise Refusal(event.error.message)
                    for choice in event.choices:
                        if choice.delta.content:
                            yield choice.delta.content
        except httpx2.TimeoutException as error:
            raise Refusal("the server is silent; is it very busy?") from error
        except httpx2.TransportError as error:
            raise Refusal("the connection to the server was lost") from error


def _events(chunks: Iterator[bytes]) -> Iterator[_Event]:
    """The events of a stream up to its end mark. Raises Refusal."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            break
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield _decode(data)
    raise Refusal("the answer broke off")


def _decode(data: bytes) -> _Event:
    try:
        return msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise Refusal("the server sent something that is no answer") from error


def _reason(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except msgspec.DecodeError:
        error = None
    return error.message if error is not None else f"the server answered {status}"
