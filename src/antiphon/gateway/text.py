"""From step outputs to text, choice by choice, the same for streams and whole bodies.

Owns a detokenizer a choice, the stop strings and the log probabilities that wait for their text.
Invariants: text joined over all pieces of a choice does not depend on how tokens were grouped into
steps; each choice has exactly one piece with `finish`, its last; a choice that met a stop string is
ended at the worker at once; an answer that did not end well raises, after all others were ended.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from antiphon.core.errors import AntiphonError, EngineFault
from antiphon.core.generation import StepOutput, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.errors import of_output
from antiphon.gateway.logprobs import ScoredToken, spelled
from antiphon.gateway.models import ServedModel
from antiphon.gateway.reply import FinishReason, TokenLogprob
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer, Reader
from antiphon.tokens.detokenizer import Delta, Detokenizer

_REASONS: dict[Terminal, FinishReason] = {
    Terminal.STOP: "stop",
    Terminal.LENGTH: "length",
    Terminal.TOOL_CALLS: "tool_calls",
    Terminal.CONTENT_FILTER: "content_filter",
}
NO_MATTER_S = 60.0  # silence matters only to streams


class Piece(msgspec.Struct, frozen=True):
    """Text of one choice that may leave now. `tokens` is empty where no log probabilities were asked for."""

    choice: int
    text: str
    tokens: Sequence[TokenLogprob] = ()
    finish: Terminal | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice ended, in OpenAI's words; None while it goes on."""
        return None if self.finish is None else _REASONS[self.finish]


class _Voice:
    """One choice while it is being said."""

    __slots__ = ("detokenizer", "is_finished", "waiting")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.waiting: deque[ScoredToken] = deque()
        self.is_finished = False


class TextStream:
    """The text of one request's answers. Choice numbers run on from one answer to the next."""

    def __init__(
        self,
        answers: Sequence[Answer],
        model: ServedModel,
        stops: Sequence[str],
        account: Account,
        log: Logger,
    ) -> None:
        self._answers = answers
        self._model = model
        self._account = account
        self._log = log
        self._first_choice = [0]
        for answer in answers:
            self._first_choice.append(self._first_choice[-1] + answer.generation.n)
        self._voices = [_Voice(Detokenizer(model.tokenizer, stops)) for _ in range(self._first_choice[-1])]

    @property
    def fingerprint(self) -> str:
        """Same fingerprint and seed, same text: it names the weights and the engine that computes them."""
        worker = self._answers[0].worker
        what = "" if worker is None else "\0".join((worker.revision, worker.engine, worker.version))
        return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def end(self, finish: Terminal) -> None:
        """End what is open, here and at the workers."""
        for answer in self._answers:
            answer.abort(finish=finish)

    async def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        """Pieces, a batch per wake-up; an empty batch after each `idle_s` of silence."""
        reader = Reader(self._answers, idle_s=idle_s)
        try:
            while (outputs := await reader.read()) is not None:
                pieces = self._take_all(outputs)
                if pieces or not outputs:
                    yield pieces
        finally:
            reader.close()

    async def whole(self) -> list[Piece]:
        """One finished piece a choice, in order, once all of them have ended."""
        return await whole_of(self.batches(NO_MATTER_S))

    def _take_all(self, outputs: Sequence[tuple[int, StepOutput]]) -> list[Piece]:
        num_counted = self._account.num_answer_tokens
        try:
            return [piece for index, output in outputs if (piece := self._take(index, output))]
        except AntiphonError:  # what came together with it does not reach the client
            self._account.num_answer_tokens = num_counted
            raise

    def _take(self, index: int, output: StepOutput) -> Piece | None:
        choice = self._first_choice[index] + output.choice
        voice = self._voices[choice]
        if voice.is_finished:
            return None
        self._account.count_output(output)
        delta = self._push(voice, output) if output.ids else _NOTHING
        if delta.stopped:
            self._answers[index].abort(output.choice)
            return self._finish(choice, Terminal.STOP, delta)
        if output.finish is not None:
            return self._finish(choice, output.finish, delta, output.error)
        if not delta.text and not delta.num_tokens:
            return None
        return Piece(choice, delta.text, self._release(voice, delta.num_tokens))

    def _release(self, voice: _Voice, num_tokens: int) -> Sequence[TokenLogprob]:
        """The scores that travel with the text released now."""
        if not voice.waiting:
            return ()
        return [spelled(voice.waiting.popleft(), self._model) for _ in range(num_tokens)]

    def _push(self, voice: _Voice, output: StepOutput) -> Delta:
        if output.logprobs is not None:
            voice.waiting.extend(map(ScoredToken, output.ids, output.logprobs))
        try:
            return voice.detokenizer.push(output.ids)
        except IndexError as error:
            raise EngineFault("The worker sent a token that the model's vocabulary does not have.") from error

    def _finish(self, choice: int, finish: Terminal, delta: Delta, detail: str | None = None) -> Piece:
        voice = self._voices[choice]
        voice.is_finished = True
        tail = voice.detokenizer.finish() if not delta.stopped else _NOTHING
        if tail.stopped:
            finish = Terminal.STOP
        self._account.finishes.append(finish)
        error = of_output(finish, detail)
        if error is not None:
            if finish is Terminal.REFUSED:
                detail = error.code  # its words may be another server's, which may quote the client
            self._log.warning(
                "answer.failed", request_id=self._account.request_id, finish=finish.value, detail=detail
            )
            raise error
        tokens = self._release(voice, delta.num_tokens + tail.num_tokens)
        return Piece(choice, delta.text + tail.text, tokens, finish)


async def whole_of(batches: AsyncIterator[Sequence[Piece]]) -> list[Piece]:
    """One finished piece a choice, in order, once all of them have ended."""
    pieces: dict[int, list[Piece]] = {}
    async for batch in batches:
        for piece in batch:
            pieces.setdefault(piece.choice, []).append(piece)
    return [_joined(pieces[choice]) for choice in sorted(pieces)]


def _joined(parts: Sequence[Piece]) -> Piece:
    text = "".join(part.text for part in parts)
    tokens = [token for part in parts for token in part.tokens]
    return Piece(parts[-1].choice, text, tokens, parts[-1].finish)


_NOTHING = Delta("", 0, False)
