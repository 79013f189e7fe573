"""Token ids in the words of vLLM and llama-server: what is asked, and what is made of what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Generation, Sampling, Terminal, TokenLogprobs
from antiphon.router.upstreamdialects import Dialect, Heard, LlamaServer, Unheard, Vllm

END_ID = 2
NOTHING = float("-inf")


def generation(**wishes: Any) -> Generation:
    sampling = Sampling(**({"seed": 7, "max_tokens": 9, "stop_ids": (END_ID,)} | wishes))
    return Generation(id="g", model="m", sampling=sampling, token_ids=[5, 6, 7], num_prompt_tokens=3)


def encode(text: str) -> list[int]:
    return list(text.encode())


def heard(dialect: Dialect, *events: object, **wishes: Any) -> list[Heard]:
    listener = dialect.listener(generation(**wishes))
    return [listener.hear(json.dumps(event).encode()) for event in events]


def asked(dialect: Dialect, choice: int = 0, salt: str | None = "salt", **wishes: Any) -> dict[str, Any]:
    body = json.loads(dialect.body(generation(**wishes), choice, "theirs", salt))
    assert isinstance(body, dict)
    return body


def test_what_vllm_is_asked() -> None:
    """Every wish has its field there; the ids are the prompt; the salt tells tenants apart."""
    body = asked(Vllm(), logprobs=3, min_tokens=2, logit_bias=((5, -1.0),), temperature=0.5, top_k=4)
    assert body == {
        "model": "theirs",
        "prompt": [5, 6, 7],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": "salt",
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "logprobs": 3,
        "stop_token_ids": [END_ID],
        "ignore_eos": False,
        "logit_bias": {"5": -1.0},
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert asked(Vllm(), stop_ids=())["ignore_eos"] is True
    assert "cache_salt" not in asked(Vllm(), salt=None)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_seeds_fit_and_choices_differ(seed: int) -> None:
    """Each server's range of seeds; llama.cpp's word for any seed is never said."""
    vllm = [asked(Vllm(), choice, seed=seed)["seed"] for choice in range(3)]
    llama = [asked(LlamaServer(encode), choice, seed=seed)["seed"] for choice in range(3)]
    assert len(set(vllm)) == len(set(llama)) == 3
    assert all(-(2**63) <= each < 2**63 for each in vllm)
    assert all(0 <= each < 2**32 - 1 for each in llama)


def test_what_llama_server_is_asked() -> None:
    """The same wishes in its words; what it cannot do is refused, not dropped."""
    body = asked(LlamaServer(encode), logprobs=0, logit_bias=((5, -1.0),))
    assert (body["prompt"], body["n_predict"], body["n_probs"]) == ([5, 6, 7], 9, 1)
    assert body["return_tokens"] is body["stream"] is True
    assert body["logit_bias"] == [[5, -1.0]]
    assert "prompt" not in body["response_fields"]
    with pytest.raises(BadRequest) as caught:
        asked(LlamaServer(encode), min_tokens=1)
    assert caught.value.param == "min_tokens"


def test_urls() -> None:
    """The catalogue's URL is the one with /v1; llama-server's own endpoint lies beside it."""
    assert Vllm().url("http://h/v1/") == Vllm().url("http://h/v1") == "http://h/v1/completions"
    assert (
        LlamaServer(encode).url("http://h/v1")
        == LlamaServer(encode).url("http://h/")
        == "http://h/completion"
    )


def vllm_event(ids: list[int] | None, finish: str | None = None, **fields: object) -> dict[str, object]:
    choice = {
        "index": 0,
        "text": "?",
        "token_ids": ids,
        "finish_reason": finish,
        "stop_reason": None,
    } | fields
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}


def test_a_stream_of_vllm() -> None:
    """Ids as they come; the end of turn is not one of them; cached tokens from the count behind the end."""
    counted = {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}
    events = [vllm_event([10]), vllm_event([11, 12]), vllm_event([END_ID], "stop"), counted]
    assert heard(Vllm(), *events) == [
        Heard([10], []),
        Heard([11, 12], []),
        Heard([], [], Terminal.STOP),
        Heard([], [], None, 2),
    ]
    assert heard(Vllm(), vllm_event([END_ID], "length"))[0].ids == [END_ID]
    assert heard(Vllm(), vllm_event(None, "length"))[0].finish is Terminal.LENGTH


def test_scores_of_vllm() -> None:
    """Named by their ids, best first, no more than were asked for; the end of turn's own is left out."""
    logprobs = {
        "tokens": ["token_id:10", "token_id:2"],
        "token_logprobs": [-1.5, None],
        "top_logprobs": [{"token_id:10": -1.5, "token_id:9": -0.5, "token_id:8": -3.0}, None],
        "text_offset": [0, 1],
    }
    (said,) = heard(Vllm(), vllm_event([10, END_ID], "stop", logprobs=logprobs), logprobs=2)
    assert said.ids == [10]
    assert said.logprobs == [TokenLogprobs(-1.5, [(9, -0.5), (10, -1.5)])]


@pytest.mark.parametrize(
    "event",
    [
        [],
        {"choices": [{"text": "no ids"}]},
        {"choices": [{"token_ids": ["1"]}]},
        vllm_event([1], "abort"),
        vllm_event([1], logprobs={"token_logprobs": [-1.0], "top_logprobs": [{"the": -1.0}]}),
        vllm_event([1], logprobs={"token_logprobs": [-1.0], "top_logprobs": [{"token_id:x": -1.0}]}),
    ],
)
def test_what_is_not_vllms(event: object) -> None:
    """A server that does not know `return_token_ids`, or says what nobody asked for."""
    with pytest.raises(Unheard):
        heard(Vllm(), event, logprobs=1)


def llama_event(content: str, tokens: list[int], num_predicted: int, **fields: object) -> dict[str, object]:
    event = {"index": 0, "content": content, "tokens": tokens, "stop": False, "id_slot": -1}
    return event | {"tokens_predicted": num_predicted, "tokens_evaluated": 3} | fields


def llama_end(stop_type: str, num_predicted: int) -> dict[str, object]:
    timings = {"cache_n": 2, "prompt_n": 1}
    return {"stop": True, "stop_type": stop_type, "tokens_predicted": num_predicted, "timings": timings}


def test_a_stream_of_llama_server() -> None:
    """Ids, then the end; the end of turn is not among the ids."""
    events = [
        llama_event("h", [104], 1),
        llama_event("i", [105], 2),
        llama_event("", [END_ID], 3),
        llama_end("eos", 3),
    ]
    assert [(said.ids, said.finish) for said in heard(LlamaServer(encode), *events)] == [
        ([104], None),
        ([105], None),
        ([], None),
        ([], Terminal.STOP),
    ]
    (end,) = heard(LlamaServer(encode), llama_end("limit", 9))
    assert (end.finish, end.num_cached) == (Terminal.LENGTH, 2)


def test_ids_that_llama_server_left_out_are_recovered() -> None:
    """An emoji of four tokens comes as its text and its last id: the text says which the others were."""
    first, second = heard(
        LlamaServer(encode), llama_event("🎉", [0x89], 4), llama_event("!", [33], 5), logprobs=1
    )
    assert bytes(first.ids).decode() == "🎉"
    assert second.ids == [33]
    assert first.logprobs == [TokenLogprobs(NOTHING)] * 4
    score = {"id": 0x89, "logprob": -0.5, "top_logprobs": [{"id": 0x89, "logprob": -0.5}, {"id": 1}]}
    (scored,) = heard(
        LlamaServer(encode), llama_event("🎉", [0x89], 4, completion_probabilities=[score]), logprobs=1
    )
    assert scored.logprobs == [TokenLogprobs(NOTHING)] * 3 + [TokenLogprobs(-0.5, [(0x89, -0.5)])]


@pytest.mark.parametrize("event", [[], {"tokens": "x"}, llama_end("word", 3), llama_end("none", 1)])
def test_what_is_not_llama_servers(event: object) -> None:
    """Ends that were not asked for, and other shapes."""
    with pytest.raises(Unheard):
        heard(LlamaServer(encode), event)


@pytest.mark.parametrize("dialect", [Vllm(), LlamaServer(encode)], ids=["vllm", "llama-server"])
def test_errors_within_a_stream(dialect: Dialect) -> None:
    """The object is handed on as it is."""
    (said,) = heard(dialect, {"error": {"message": "full", "code": 429}})
    assert said.error is not None and json.loads(said.error)["code"] == 429
    assert heard(dialect, {"error": None, **vllm_event([1])})[0].error is None
