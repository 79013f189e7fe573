"""The served model says what llama-cpp-python's own high-level class says, alone and in a crowd.

Served with the shipped weights (`--weights as-is`) and compared at temperature 0 over 20 prompts.
Alone the batches have the same shapes, so the texts are equal. In a batch of 16 llama.cpp's kernels
round differently, which may tip a near-tie: up to the first difference the texts are equal, and
there our own log probabilities of the two tokens lie within `NEAR_TIE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import openai
import pytest
from openai.types.chat.chat_completion import Choice
from tests.support.served import serving

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

NEAR_TIE = 0.5  # nats; wrong KV or a wrong prompt moves log probabilities by several
MAX_TOKENS = 24
PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 3?",
    "Explain gravity to a child in one sentence.",
    "Why is the sky blue?",
    "List two uses of a hammer.",
    "Give me a short poem about rain.",
    "Who wrote Romeo and Juliet?",
    "def add(a, b):\n    return",
    "Summarise: The cat sat on the mat and looked at the dog.",
    "What is H2O?",
    "Say hello in Japanese: こんにちは",
    "How do plants make food? 🌱",
    "What comes after Tuesday?",
    "Correct this: 'She go to school.'",
    "What is the largest planet?",
    "Tell me a fact about bees.",
    "  Leading blanks\n\nand lines, <|im_start|> included.",
]


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You are terse."}, {"role": "user", "content": prompt}]


@pytest.fixture(scope="module")
def references(model_path: Path) -> list[list[str]]:
    """What the high-level class answers, with and without flash attention: the server has measured
    which one is faster here. (Its own prompt would take control tokens from the user's text.)"""
    texts: list[list[str]] = []
    for flash in (True, False):
        model = llama_cpp.Llama(str(model_path), n_ctx=512, n_threads=1, flash_attn=flash, verbose=False)
        texts.append([answer(model, prompt) for prompt in PROMPTS])
        model.close()
    return texts


def answer(model: llama_cpp.Llama, prompt: str) -> str:
    model.reset()
    plain = messages(prompt.replace("<|", "< |"))
    reply = model.create_chat_completion(plain, temperature=0.0, max_tokens=MAX_TOKENS)
    return str(reply["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A real server with the shipped weights, 16 sequences at once."""
    options = ("--port", "0", "--weights", "as-is", "--max-sequences", "16", "--context", "512")
    options += ("--queue-wait", "600")  # all 20 come at once, and none is to be refused
    with serving("--model", "smollm2", *options) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            yield client
        served.stop()


def ask(client: openai.OpenAI, prompt: str) -> Choice:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=messages(prompt.replace("<|", "< |")),
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        logprobs=True,
        top_logprobs=5,
    )
    return reply.choices[0]


def assert_same_or_near_tie(choice: Choice, expected: str) -> None:
    """Equal texts, or a first difference at which both tokens were almost equally likely."""
    text = choice.message.content or ""
    if text == expected:
        return
    assert choice.logprobs is not None
    said = b""
    for entry in choice.logprobs.content or []:
        token = bytes(entry.bytes or b"")
        if not expected.encode().startswith(said + token):
            rest = expected.encode()[len(said) :]
            rivals = [t for t in entry.top_logprobs if t.bytes and rest.startswith(bytes(t.bytes))]
            assert rivals, f"{text!r} and {expected!r} differ by more than a near-tie"
            assert entry.logprob - max(t.logprob for t in rivals) < NEAR_TIE
            return
        said += token
    # One text is the beginning of the other: the end of the turn was the near-tie.
    assert expected.startswith(text)


def nearest(choices: list[Choice], references: list[list[str]]) -> tuple[list[str], int]:
    """The reference that agrees with most answers, and with how many."""
    counts = [sum(c.message.content == e for c, e in zip(choices, r, strict=True)) for r in references]
    return references[counts.index(max(counts))], max(counts)


def test_alone(client: openai.OpenAI, references: list[list[str]]) -> None:
    """One after the other the batches have the same shapes: all texts are equal."""
    choices = [ask(client, prompt) for prompt in PROMPTS]
    expected, _ = nearest(choices, references)
    assert [c.message.content for c in choices] == expected


def test_in_a_batch_of_16(client: openai.OpenAI, references: list[list[str]]) -> None:
    """All at once: equal up to the first near-tie."""
    with ThreadPoolExecutor(16) as pool:
        choices = list(pool.map(lambda prompt: ask(client, prompt), PROMPTS))
    for choice, expected in zip(choices, nearest(choices, references)[0], strict=True):
        assert_same_or_near_tie(choice, expected)


def test_the_same_answer_again_from_cached_blocks(client: openai.OpenAI) -> None:
    """A prompt whose blocks are cached gives the same answer, and usage says so."""
    long = "Repeat after me: " + "the quick brown fox jumps over the lazy dog, " * 8
    first, second = ask(client, long), ask(client, long)
    assert_same_or_near_tie(second, first.message.content or "")
    usage = client.chat.completions.create(
        model="smollm2", messages=messages(long), temperature=0.0, max_tokens=1
    ).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 64
