"""/openapi.json, made from the same structs that decode requests and encode answers.

Each operation documents its success and, as `default`, the error envelope, which is what every
other status carries. Whether a key is needed depends on where the gateway listens: the document
allows both, except for what is always open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from antiphon import __version__
from antiphon.gateway.adminschema import (
    KeyChange,
    KeyList,
    KeyObject,
    NewKey,
    NewTenant,
    TenantList,
    TenantObject,
    UsageRecords,
    UsageTotals,
)
from antiphon.gateway.reply import (
    ChatCompletion,
    ChatCompletionChunk,
    ClientToken,
    Completion,
    ErrorResponse,
    Health,
    Model,
    ModelList,
)
from antiphon.gateway.schema import ChatRequest, ClientTokenRequest, CompletionRequest

_REF = "#/components/schemas/{name}"
_KEY = "key"
_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One documented route."""

    method: str
    path: str
    summary: str
    reply: type[msgspec.Struct]
    request: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    is_open: bool = False  # never wants a key


OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer a chat.", ChatCompletion, ChatRequest, ChatCompletionChunk
    ),
    Operation("post", "/v1/completions", "Go on with a text.", Completion, CompletionRequest, Completion),
    Operation("get", "/v1/models", "List the models.", ModelList),
    Operation("get", "/v1/models/{model}", "Show one model.", Model),
    Operation(
        "post", "/v1/client_tokens", "Make a token for a browser or a phone.", ClientToken, ClientTokenRequest
    ),
    Operation("get", "/admin/usage", "Add up usage.", UsageTotals),
    Operation("get", "/admin/usage/requests", "List usage request by request.", UsageRecords),
    Operation("get", "/admin/keys", "List the keys.", KeyList),
    Operation("post", "/admin/keys", "Make a key.", KeyObject, NewKey),
    Operation("patch", "/admin/keys/{key_id}", "Change what a key allows.", KeyObject, KeyChange),
    Operation("delete", "/admin/keys/{key_id}", "Revoke a key.", KeyObject),
    Operation("get", "/admin/tenants", "List the tenants.", TenantList),
    Operation("post", "/admin/tenants", "Make a tenant.", TenantObject, NewTenant),
    Operation("get", "/health", "Say that the process lives.", Health, is_open=True),
)


def openapi_document() -> dict[str, Any]:
    """The whole document, as JSON-ready values."""
    types: list[type[msgspec.Struct]] = [ErrorResponse]
    for operation in OPERATIONS:
        types += [t for t in (operation.reply, operation.request, operation.chunk) if t is not None]
    schemas, components = msgspec.json.schema_components(dict.fromkeys(types), ref_template=_REF)
    by_type = dict(zip(dict.fromkeys(types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Antiphon", "version": __version__},
        "paths": paths,
        "security": [{}, {_KEY: []}],
        "components": {
            "schemas": components,
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, schemas: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    content = {"application/json": {"schema": schemas[operation.reply]}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": schemas[operation.chunk]}
    document: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.summary.rstrip(".").lower().replace(" ", "_"),
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {
                "description": "Error.",
                "content": {"application/json": {"schema": schemas[ErrorResponse]}},
            },
        },
    }
    if operation.is_open:
        document["security"] = []
    names = _PARAMETER.findall(operation.path)
    if names:
        document["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.request is not None:
        document["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[operation.request]}},
        }
    return document
