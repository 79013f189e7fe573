"""docs/api.md: each request field with its bounds, and what becomes of it.

Bounds come from the gateway's schema, refused names from its parser; what a field does is said here.
A field without a note, or a note without a field, is an error, so the page cannot fall behind.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from antiphon.gateway.openapi import OPERATIONS
from antiphon.gateway.parse import REFUSED
from antiphon.gateway.schema import ChatRequest, CompletionRequest

_HEAD = """# API

Written by `make docs` from `gateway/schema.py`, `gateway/parse.py` and `scripts/fields.py`; do not edit.

OpenAI's API as its SDKs speak it. Base URL: `http://127.0.0.1:8000/v1`. `/openapi.json` has the schemas of
requests and answers. Values are strict: no number in a string, no 1.0 for 1; `null` is the same as leaving a
field out. What is wrong is answered with a 4xx and `{"error": {"message", "type", "param", "code"}}` before a
byte of stream is sent; a fault after that is the stream's last event, with the same body and without the end
mark `[DONE]`.

Callers send their key as `Authorization: Bearer sk-antiphon-…`. Until the first key is created
(`antiphon keys create`) any key is taken on a loopback address, as SDKs always send one; from then on a key
that is sent must be a good one, or the answer is 401 with the code `invalid_api_key`. On loopback a request
without a key is the tenant `local`; at any other address a key is required. `/health` and `/metrics` need
none. A revoked key is refused within 5 seconds at all gateways. While the database of keys does not answer,
requests with a key get 503 `store_unavailable`.

What is computed for a request may be reused for another one that begins alike, within one tenant and never
between two. `cache_salt` and `prompt_cache_key` narrow that further: requests share only with those that
carry the same values. They cannot widen it. System prompts that the operator lists (`--public-prefix-file`)
are shared by all.
"""

_ADMIN = """## Admin

The routes under `/admin` are for keys made with `--admin`, and for nobody else: 403 `permission_denied`, on
loopback without a key too. What such a key may ask models is another matter.

`GET /admin/usage` adds up by `by=day` (of UTC), `model`, `tenant` or `key`, each currency on its own; `GET
/admin/usage/requests` has one row a request. Both take `since` and `until` (`2026-12-01` or
`2026-12-01T12:00:00Z`, by when a request was let in; `until` is not in it), `tenant` (name) and `key` (id),
and answer JSON, or CSV where `Accept: text/csv` or `format=csv` asks for it. Answers leave as they are read,
of any length; one that breaks off is no whole body. `cost_micros` are millionths of the `currency`;
`num_estimated` and `is_estimated` mark what is not known exactly, such as requests whose gateway was killed
(`outcome` `lost`).

`POST /admin/keys` takes what `antiphon keys create` does: `tenant`, `name`, `limits` (any of
`requests_per_minute`, `tokens_per_minute`, `max_concurrent`, `tokens_per_day`, `tokens_per_month`), `models`,
`priority`, `is_admin`. Its answer holds the key's text, once. In `PATCH /admin/keys/{key_id}` a field that is
left out stays as it is, and null takes a limit away. Fields that are not known are refused. What changes
holds at all gateways within 5 seconds.
"""

_SHARED = {
    "model": "Honoured: a name or alias of `/v1/models`.",
    "n": "Honoured; the prompt is computed and counted once.",
    "stream": "Honoured.",
    "stream_options": "`include_usage` is honoured; `include_obfuscation` is ignored, nothing is padded.",
    "stop": "Honoured, also across tokens; the stop string itself is not sent.",
    "seed": "Honoured: the same draws whatever else runs. Batch arithmetic may still tip a near-tie.",
    "temperature": "Honoured; 0 is greedy. Default 1.",
    "top_p": "Honoured. Default 1.",
    "top_k": "Honoured; not OpenAI's. 0 and -1: all tokens.",
    "min_p": "Honoured; not OpenAI's.",
    "presence_penalty": "Honoured; counts answer tokens only.",
    "frequency_penalty": "Honoured; counts answer tokens only.",
    "logit_bias": "Honoured; keys are token ids of the model.",
    "min_tokens": "Honoured; not OpenAI's. The model cannot end its turn before.",
    "ignore_eos": "Honoured; not OpenAI's. The model cannot end its turn at all.",
    "user": "Ignored; changes neither the answer nor what is shared.",
    "cache_salt": "Honoured; not OpenAI's, means what it means in vLLM: KV is shared only with requests that "
    "carry the same.",
    "prompt_cache_key": "Honoured likewise, on top of `cache_salt`; empty is the same as absent.",
}
_CHAT = {
    "messages": "Honoured: roles system, developer (as system), user, assistant; content as a string or as "
    "`text` and `refusal` parts. Other parts, tool calls and tool results are refused.",
    "max_completion_tokens": "Honoured; wins over `max_tokens`. Default: what the context has room for.",
    "max_tokens": "Honoured.",
    "logprobs": "Honoured.",
    "top_logprobs": "Honoured; needs `logprobs`.",
    "service_tier": "Ignored; the answer says `default`.",
    "response_format": "`text` is honoured; `json_object` and `json_schema` are refused.",
    "tools": "Refused unless empty.",
    "tool_choice": "Refused unless `none`.",
    "functions": "Refused unless empty.",
    "function_call": "Refused unless `none`.",
    "modalities": 'Refused unless `["text"]`.',
    "safety_identifier": "Ignored; changes neither the answer nor what is shared.",
    "metadata": "Ignored; changes nothing in the answer.",
}
_COMPLETION = {
    "prompt": "Honoured: a string, strings, token ids, or lists of token ids.",
    "max_tokens": "Honoured. Default 16.",
    "echo": "Honoured, but not together with `logprobs`.",
    "logprobs": "Honoured.",
    "best_of": "Refused unless it equals `n`.",
    "suffix": "Refused.",
}


def api_page() -> str:
    """The page."""
    routes = [f"* `{o.method.upper()} {o.path}`: {o.summary}" for o in OPERATIONS]
    routes += ["* `GET /metrics`: see [metrics.md](metrics.md).", "* `GET /openapi.json`: the schemas."]
    refused = textwrap.fill(", ".join(f"`{name}`" for name in sorted(REFUSED)), 110, break_on_hyphens=False)
    parts = [
        _HEAD,
        *routes,
        "",
        *_section("POST /v1/chat/completions", ChatRequest, _SHARED | _CHAT),
        *_section("POST /v1/completions", CompletionRequest, _SHARED | _COMPLETION),
        _ADMIN,
        "## Refused on both\n",
        f"They would change the answer, or steer what a client must not:\n{refused}.\n",
        "Any other field is dropped.\n",
    ]
    return "\n".join(parts)


def _section(title: str, request: type[msgspec.Struct], notes: Mapping[str, str]) -> Iterator[str]:
    schema = msgspec.json.schema_components([request])[1][request.__name__]
    properties: dict[str, Any] = schema["properties"]
    if properties.keys() != notes.keys():
        raise ValueError(f"{request.__name__}: fields and notes differ in {properties.keys() ^ notes.keys()}")
    yield f"## {title}\n"
    yield "| field | value | what becomes of it |"
    yield "| --- | --- | --- |"
    for name in sorted(properties, key=list(notes).index):
        mark = " (required)" if name in schema["required"] else ""
        yield f"| `{name}`{mark} | {_value(properties[name])} | {notes[name]} |".replace("\n", " ")
    yield ""


def _value(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_value(option) for option in schema["anyOf"] if option != {"type": "null"})
    kind = str(schema.get("type", "object" if "$ref" in schema else "anything"))
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None and abs(high) < 2**53:
        kind += f" {low:g} to {high:g}"
    elif low is not None and abs(low) < 2**53:
        kind += f" from {low:g}"
    if "maxLength" in schema:
        kind += f" up to {schema['maxLength']} characters"
    if "maxItems" in schema:
        kind += f" up to {schema['maxItems']}"
    return kind
