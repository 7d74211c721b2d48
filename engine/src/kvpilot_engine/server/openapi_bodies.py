"""Request bodies as JSON Schema: generated from the types that read them, with the limits that only the model knows.

Invariant: what these schemas refuse, the server refuses. The reverse does not hold: fields that depend on each other,
and grammars, are checked by the server alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvpilot_engine.core.sampling_params import MAX_LOGIT_BIAS
from kvpilot_engine.server.openai_schema import ChatCompletionBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvpilot_engine.server.sampling_fields import MAX_BAD_WORDS, MAX_STOPS
from kvpilot_engine.text.structured_output import MAX_GRAMMAR_CHARS
from kvpilot_engine.text.tool_definitions import MAX_TOOLS

Schema = dict[str, Any]
BODIES: dict[str, type[BaseModel]] = {
    "ChatCompletionRequest": ChatCompletionBody,
    "CompletionRequest": CompletionBody,
    "TokenizeRequest": TokenizeBody,
    "DetokenizeRequest": DetokenizeBody,
}
_NULL: Schema = {"type": "null"}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model allows; 0 while it loads: then the schema has no such limit."""

    max_model_len: int = 0
    vocab_size: int = 0
    max_logprobs: int = 20
    served_names: tuple[str, ...] = ()
    """Of the server: names that `model` may have; empty: any."""


def build_body_schemas(limits: ModelLimits) -> dict[str, Schema]:
    """By the names of BODIES, and the types that they refer to."""
    schemas: dict[str, Schema] = {}
    for name, kind in BODIES.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
    for schema in schemas.values():
        _drop_what_is_for_developers(schema)
    refined = _refinements(limits)
    for name in BODIES:
        properties = schemas[name]["properties"]
        properties |= {field: refined[field] for field in properties.keys() & refined.keys()}
    chat, completion = schemas["ChatCompletionRequest"], schemas["CompletionRequest"]
    text: Schema = {"type": "string"}
    tokens = _list_of(_token(limits), at_least=1, at_most=limits.max_model_len)
    forms = [text, _list_of(text, at_least=1), tokens, _list_of(tokens, at_least=1)]
    completion["properties"]["prompt"] = {"anyOf": forms}
    chat["properties"]["logprobs"] = _or_null({"type": "boolean"})
    completion["properties"]["logprobs"] = _or_null(_integer(0, limits.max_logprobs))
    schemas["TokenizeRequest"]["anyOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": _NULL}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": _NULL}},
    ]
    content = [{"type": "string"}, _list_of({"$ref": "#/components/schemas/ContentPart"})]
    schemas["ChatMessage"]["properties"]["content"] = _or_null(*content)
    return schemas


def _drop_what_is_for_developers(schema: Schema) -> None:
    """Titles repeat the names, and docstrings speak of the code."""
    schema.pop("description", None)
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)


def _integer(lowest: int, highest: int = 0) -> Schema:
    return {"type": "integer", "minimum": lowest, **({"maximum": highest} if highest else {})}


def _token(limits: ModelLimits) -> Schema:
    return _integer(0, max(0, limits.vocab_size - 1))


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, _NULL], "default": None}


def _list_of(items: Schema, *, at_least: int = 0, at_most: int = 0) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if at_least:
        schema["minItems"] = at_least
    if at_most:
        schema["maxItems"] = at_most
    return schema


def _refinements(limits: ModelLimits) -> dict[str, Schema]:
    """Fields whose limits are not in their types."""
    longest, top = limits.max_model_len, limits.max_logprobs
    token = _token(limits)
    text: Schema = {"type": "string"}
    stop: Schema = {"type": "string", "minLength": 1}
    grammar: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARS}
    choices = _list_of({"type": "string", "minLength": 1}, at_least=1)
    model: Schema = {"enum": list(limits.served_names)} if limits.served_names else {"type": "string"}
    return {
        "model": _or_null(model),
        "logit_bias": _or_null(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,20}$"},
                "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
            }
        ),
        "max_tokens": _or_null(_integer(0, longest)),
        "max_completion_tokens": _or_null(_integer(0, longest)),
        "min_tokens": _or_null(_integer(0, longest)),
        "top_logprobs": _or_null(_integer(0, top)),
        "prompt_logprobs": _or_null(_integer(0, top)),
        "truncate_prompt_tokens": _or_null({"const": -1}, _integer(1, longest)),
        "tokens": _list_of(token),
        "stop": _or_null(stop, _list_of(stop, at_most=MAX_STOPS)),
        "stop_token_ids": _or_null(_list_of(token)),
        "tools": _or_null(_list_of({"$ref": "#/components/schemas/Tool"}, at_most=MAX_TOOLS)),
        "tool_choice": _or_null(
            {"enum": ["none", "auto", "required"]}, {"$ref": "#/components/schemas/NamedToolChoice"}
        ),
        "response_format": _or_null({"$ref": "#/components/schemas/ResponseFormat"}),
        "structured_outputs": _or_null({"$ref": "#/components/schemas/StructuredOutputs"}),
        "bad_words": _or_null(_list_of({"type": "string", "minLength": 1}, at_most=MAX_BAD_WORDS)),
        "guided_json": _or_null({"type": "object"}, text),
        "guided_regex": _or_null(grammar),
        "guided_choice": _or_null(choices),
        "guided_grammar": _or_null(grammar),
    }


PARTS: dict[str, Schema] = {
    "ContentPart": {
        "anyOf": [
            {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
            },
            {
                "type": "object",
                "required": ["type", "refusal"],
                "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
            },
        ]
    },
    "Tool": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"], "description": "a JSON schema of an object"},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
    "NamedToolChoice": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        },
    },
    "ResponseFormat": {
        "oneOf": [
            {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
            {
                "type": "object",
                "required": ["type", "json_schema"],
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                            "description": {"type": ["string", "null"]},
                            "schema": {"type": ["object", "boolean", "null"]},
                            "strict": {"type": ["boolean", "null"]},
                        },
                    },
                },
            },
        ]
    },
    "StructuredOutputs": {
        "type": "object",
        "description": "exactly one of the properties",
        "properties": {
            "json": {"type": ["object", "boolean", "string", "null"]},
            "regex": {"type": ["string", "null"]},
            "choice": {"type": ["array", "null"], "items": {"type": "string"}},
            "grammar": {"type": ["string", "null"]},
            "json_object": {"type": ["boolean", "null"]},
        },
    },
}
"""Schemas that the refined fields refer to."""
