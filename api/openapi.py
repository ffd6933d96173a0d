"""The OpenAPI 3.1 document of `/openapi.json`, from request and answer types. Called by `api/routes/operations.py`."""

from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from api.generation.wire import Answer, ChatChoice, CompletionChoice
from api.protocol.chat import ChatRequest
from api.protocol.completions import CompletionRequest
from api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from api.version import VERSION

_REF = "#/components/schemas/{model}"
_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def build() -> dict[str, Any]:
    """The document. Costs some milliseconds; the caller keeps it."""
    _, definitions = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF)
    answers, answer_schemas = msgspec.json.schema_components(
        (Answer[ChatChoice], Answer[CompletionChoice]), ref_template=_REF.replace("{model}", "{name}")
    )
    chat, completion = answers
    return {
        "openapi": "3.1.0",
        "info": {"title": "Twinmesh", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "components": {
            "schemas": definitions["$defs"] | answer_schemas | {"Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
        "paths": {
            "/v1/chat/completions": _post("Chat completion", "ChatRequest", chat, streams=True),
            "/v1/completions": _post("Text completion", "CompletionRequest", completion, streams=True),
            "/tokenize": _post("Text or conversation to token ids", "TokenizeRequest", _TOKENS),
            "/detokenize": _post("Token ids to text", "DetokenizeRequest", _PROMPT),
            "/v1/models": _get("Models served here"),
            "/v1/models/{id}": _get("One model", parameters=[_MODEL_ID]),
            "/version": _get("Version of the server"),
            "/server_info": _get("Versions, devices, model, configuration without keys"),
            "/openapi.json": _get("This document"),
            "/admin/scheduler/requests/{id}": _get(
                "Why a request waits or was put back; needs an admin key", parameters=[_MODEL_ID]
            ),
            "/metrics": _get("Prometheus metrics", media="text/plain"),
            "/health": _get("Whether the process lives", is_open=True),
            "/ready": _get("Whether requests are taken", is_open=True),
        },
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_TOKENS = {
    "type": "object",
    "properties": {
        "tokens": {"type": "array", "items": {"type": "integer"}},
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
    },
}
_PROMPT = {"type": "object", "properties": {"prompt": {"type": "string"}}}
_MODEL_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def _errors(*statuses: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": "Error", "content": content} for status in statuses}


def _post(summary: str, request: str, answer: dict[str, Any], streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": body,
            "responses": {
                "200": {"description": "OK", "content": content},
                **_errors(400, 401, 404, 408, 413, 415, 429, 500, 503),
            },
        }
    }


def _get(
    summary: str,
    *,
    media: str = "application/json",
    is_open: bool = False,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": {media: {}}}, **_errors(401, 404, 503)},
    }
    if is_open:
        operation["security"] = []
    if parameters:
        operation["parameters"] = parameters
    return {"get": operation}
