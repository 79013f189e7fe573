"""A request's wishes as sampling, and messages as the template sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.core.errors import BadRequest, ContextTooLong, NotFound
from antiphon.gateway.chat import chat_messages
from antiphon.gateway.completions import prompts_of
from antiphon.gateway.models import ServedModel, ServedModels
from antiphon.gateway.parse import parse_chat, parse_completion
from antiphon.gateway.sampling import sampling_of
from antiphon.gateway.schema import CompletionRequest
from antiphon.tokens.template import ChatMessage


def chat(**fields: object) -> Any:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_chat(json.dumps(body).encode())


def completion(prompt: object = "x", **fields: object) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "scripted", "prompt": prompt} | fields).encode())


def test_defaults(model: ServedModel) -> None:
    """A plain chat samples at temperature 1, may fill the room and has a seed of its own."""
    first, second = (sampling_of(chat(), model, 100) for _ in range(2))
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (100, 1.0, 1.0, 0)
    assert first.logprobs is None
    assert first.stop_ids == model.tokenizer.end_ids
    assert 0 <= first.seed < 2**53
    assert first.seed != second.seed
    assert sampling_of(completion(), model, 100).max_tokens == 16


@pytest.mark.parametrize("limit", [99, 100, 101, 10**8, 2**31, 2**63, 10**18, 10**300])
def test_huge_limits_are_clamped(model: ServedModel, limit: int) -> None:
    """Coding clients send huge defaults; what reaches a worker fits the room."""
    for request in (chat(max_tokens=limit), chat(max_completion_tokens=limit), completion(max_tokens=limit)):
        assert sampling_of(request, model, 100).max_tokens == min(limit, 100)


def test_everything_is_carried(model: ServedModel) -> None:
    """Each wish has its place in the sampling."""
    request = chat(
        seed=-(2**63),
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"104": 5, "3": -100},
        logprobs=True,
        top_logprobs=3,
        min_tokens=2,
        ignore_eos=True,
        max_tokens=7,
    )
    sampling = sampling_of(request, model, 100)
    assert sampling.seed == -(2**63)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((3, -100.0), (104, 5.0))
    assert (sampling.logprobs, sampling.min_tokens, sampling.max_tokens) == (3, 2, 7)
    assert sampling.stop_ids == ()


def test_scores_without_alternatives(model: ServedModel) -> None:
    """`logprobs` alone scores the chosen token only."""
    assert sampling_of(chat(logprobs=True), model, 9).logprobs == 0
    assert sampling_of(chat(logprobs=False), model, 9).logprobs is None
    assert sampling_of(completion(logprobs=0), model, 9).logprobs == 0


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-300, 5e-324, 9e-6])
def test_tiny_temperatures_are_greedy(model: ServedModel, temperature: float) -> None:
    """They would overflow float32 logits."""
    assert sampling_of(chat(temperature=temperature), model, 9).temperature == 0.0


@pytest.mark.parametrize(("asked", "meant"), [(-1, 0), (0, 0), (5, 5), (2**70, 2**31 - 1)])
def test_top_k_fits_32_bits(model: ServedModel, asked: int, meant: int) -> None:
    """-1 and 0 both mean all."""
    assert sampling_of(chat(top_k=asked), model, 9).top_k == meant


@pytest.mark.parametrize("fields", [{"min_tokens": 6, "max_tokens": 5}, {"min_tokens": 101}])
def test_a_floor_above_the_ceiling_is_refused(model: ServedModel, fields: dict[str, int]) -> None:
    """The ceiling is the room where none was given."""
    with pytest.raises(BadRequest) as caught:
        sampling_of(chat(**fields), model, 100)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("token_id", [-1, 258, 10**12])
def test_a_bias_of_no_token_is_refused(model: ServedModel, token_id: int) -> None:
    """Ids outside the vocabulary never reach a worker."""
    with pytest.raises(BadRequest) as caught:
        sampling_of(chat(logit_bias={str(token_id): 1}), model, 9)
    assert caught.value.param == "logit_bias"


def messages_of(*messages: dict[str, object]) -> list[ChatMessage]:
    return chat_messages(chat(messages=list(messages)).messages)


def test_messages() -> None:
    """Strings and parts become text, the developer is the system, names are kept."""
    assert messages_of(
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "x",
        },
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "tool_calls": []},
    ) == [
        ChatMessage("system", "be brief"),
        ChatMessage("user", "a\nb", "x"),
        ChatMessage("assistant", ""),
        ChatMessage("assistant", "no"),
        ChatMessage("assistant", "never"),
    ]


BAD_MESSAGES: list[tuple[dict[str, object], str]] = [
    ({"role": "user"}, "messages.[1].content"),
    ({"role": "user", "content": None}, "messages.[1].content"),
    ({"role": "user", "content": []}, "messages.[1].content"),
    ({"role": "assistant"}, "messages.[1].content"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages.[1].content.[0]"),
    (
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]},
        "messages.[1].content.[1]",
    ),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.[1].content.[0]"),
    ({"role": "tool", "content": "x", "tool_call_id": "c"}, "messages.[1].role"),
    ({"role": "function", "content": "x", "name": "f"}, "messages.[1].role"),
    ({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, "messages.[1].tool_calls"),
]


@pytest.mark.parametrize(("message", "param"), BAD_MESSAGES)
def test_messages_without_text_are_refused(message: dict[str, object], param: str) -> None:
    """No part is dropped silently; the error says which one it was."""
    with pytest.raises(BadRequest) as caught:
        messages_of({"role": "user", "content": "x"}, message)
    assert caught.value.param == param


def test_an_unserved_part_is_named() -> None:
    """So that a user sees what did not work."""
    with pytest.raises(BadRequest, match="image_url"):
        messages_of({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]})


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[104, 105]]),
        (["hi", "a"], [[104, 105], [97]]),
        ([104, 105], [[104, 105]]),
        ([[104], [105, 105]], [[104], [105, 105]]),
    ],
)
def test_prompts(model: ServedModel, prompt: object, ids: list[list[int]]) -> None:
    """A text, texts, ids, or lists of ids."""
    prompts = prompts_of(completion(prompt, echo=True), model)
    assert [p.ids for p in prompts] == ids
    assert [p.text for p in prompts] == [bytes(i).decode() for i in ids]


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], ["a", 1], [[1], "a"], [-1], [258], [[10**12]], ["a"] * 129]
)
def test_bad_prompts(model: ServedModel, prompt: object) -> None:
    """Empty, mixed, outside the vocabulary or too many."""
    with pytest.raises(BadRequest) as caught:
        prompts_of(completion(prompt), model)
    assert caught.value.param == "prompt"


def test_prompts_times_n_are_bounded(model: ServedModel) -> None:
    """The product counts, not each alone."""
    assert len(prompts_of(completion(["a"] * 32, n=4), model)) == 32
    with pytest.raises(BadRequest):
        prompts_of(completion(["a"] * 33, n=4), model)


def test_hopeless_lengths_are_not_tokenised(model: ServedModel) -> None:
    """They are refused by their number of characters; the message names the maximum."""
    with pytest.raises(ContextTooLong, match="maximum context length is 4096 tokens") as caught:
        model.chat_prompt([ChatMessage("user", "x" * 10_000)])
    assert caught.value.param == "messages"
    with pytest.raises(ContextTooLong) as caught:
        model.text_prompt("x" * 10_000)
    assert caught.value.param == "prompt"


def test_models_by_name_and_alias(model: ServedModel) -> None:
    """Names may hold slashes; unknown ones are said back, shortened."""
    models = ServedModels([model])
    assert models.choose("scripted", b"", 0.5) == models.choose("org/alias", b"", 0.5) == [model]
    with pytest.raises(NotFound) as caught:
        models.choose("no" * 1000, b"", 0.5)
    assert caught.value.code == "model_not_found"
    assert len(caught.value.message) < 200
