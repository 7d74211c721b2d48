"""The server's answers as JSON Schema. Objects are closed: an answer with a property that is not told here is a bug.

What /engine tells is generated from the types that it is told from.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from kvpilot_engine.core.memory_report import MemoryReport
from kvpilot_engine.server.error_mapping import CODES
from kvpilot_engine.service.async_engine import EngineState
from kvpilot_engine.service.messages import OOMEvent, TuningStatus

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
RATIO: Schema = {"type": "number", "minimum": 0, "maximum": 1}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def mapped(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": listed({"type": "integer", "minimum": 0, "maximum": 255})}
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_STOP = nullable({"type": ["string", "integer"]})
_FUNCTION = closed({"name": STRING, "arguments": STRING})
_PROMPT_LOGPROBS = listed(nullable(mapped(closed({"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}))))
_LENGTHS = mapped(COUNT)
_IDS = listed(COUNT)
_OUTPUT_IDS = {"token_ids": _IDS}
"""Told with return_token_ids only."""
_COST = closed(
    {"block_size": COUNT, "waste_ratio": RATIO, "wasted_tokens": NUMBER, "wasted_bytes": COUNT, "table_len": NUMBER}
)


def _told_from(kind: Any, **added: Schema) -> Schema:
    """The schema of a dataclass as it is told: all its fields, always."""
    schema = TypeAdapter(kind).json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    properties = {name: _inline(field, definitions) for name, field in schema["properties"].items()}
    return closed({**properties, **added})


def _inline(field: Schema, definitions: dict[str, Schema]) -> Schema:
    name = str(field.get("$ref", "")).rpartition("/")[2]
    found = definitions.get(name, field)
    return {key: value for key, value in found.items() if key not in ("title", "description", "default")}


_LOAD = closed(
    {
        "kv_usage_ratio": RATIO,
        "kv_cached_ratio": RATIO,
        **dict.fromkeys(
            (
                "running",
                "waiting",
                "waiting_capacity",
                "waiting_budget",
                "blocks_total",
                "blocks_free",
                "blocks_used",
                "blocks_cached",
                "blocks_held_out",
                "block_size",
                "preemptions_total",
                "recomputed_tokens_total",
                "prompt_tokens_total",
                "generation_tokens_total",
            ),
            COUNT,
        ),
    }
)

ANSWERS: dict[str, Schema] = {
    "Error": closed(
        {
            "error": closed(
                {"message": STRING, "type": STRING, "param": nullable(STRING), "code": {"enum": sorted(set(CODES))}}
            )
        }
    ),
    "Usage": closed(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": closed({"cached_tokens": COUNT}),
        }
    ),
    "Model": closed(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": NULL,
            "max_model_len": nullable(COUNT),
            "permission": listed({"type": "object"}),
        }
    ),
    "ModelList": closed({"object": {"const": "list"}, "data": listed(ref("Model"))}),
    "ToolCall": closed({"id": STRING, "type": {"const": "function"}, "function": _FUNCTION}),
    "ChatLogprobs": closed(
        {
            "content": listed(closed({**_TOKEN, "top_logprobs": listed(closed(_TOKEN))})),
            "refusal": NULL,
        }
    ),
    "CompletionLogprobs": closed(
        {
            "tokens": listed(STRING),
            "token_logprobs": listed(nullable(NUMBER)),
            "top_logprobs": listed(nullable(mapped(NUMBER))),
            "text_offset": listed(COUNT),
        }
    ),
    "ChatCompletion": closed(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": listed(
                closed(
                    {
                        "index": COUNT,
                        "message": closed(
                            {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": NULL},
                            {"tool_calls": listed(ref("ToolCall"))},
                        ),
                        "logprobs": nullable(ref("ChatLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                    },
                    _OUTPUT_IDS,
                )
            ),
            "usage": ref("Usage"),
        },
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS},
    ),
    "Completion": closed(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": listed(
                closed(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": nullable(ref("CompletionLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                    },
                    {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS, **_OUTPUT_IDS},
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "ChatCompletionChunk": closed(
        {
            **_HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": listed(
                closed(
                    {
                        "index": COUNT,
                        "delta": closed(
                            {},
                            {
                                "role": {"const": "assistant"},
                                "content": STRING,
                                "tool_calls": listed(
                                    closed(
                                        {"index": COUNT, "function": closed({"arguments": STRING}, {"name": STRING})},
                                        {"id": STRING, "type": {"const": "function"}},
                                    )
                                ),
                            },
                        ),
                        "logprobs": nullable(ref("ChatLogprobs")),
                        "finish_reason": nullable(_FINISH),
                    },
                    {"stop_reason": _STOP, "prompt_token_ids": _IDS, **_OUTPUT_IDS},
                )
            ),
        },
        {"usage": nullable(ref("Usage"))},
    ),
    "CompletionChunk": closed(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": listed(
                closed(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": nullable(ref("CompletionLogprobs")),
                        "finish_reason": nullable(_FINISH),
                    },
                    {"stop_reason": _STOP, "prompt_token_ids": _IDS, **_OUTPUT_IDS},
                )
            ),
        },
        {"usage": nullable(ref("Usage"))},
    ),
    "Tokens": closed({"count": COUNT, "max_model_len": COUNT, "tokens": listed(COUNT)}, {"token_strs": listed(STRING)}),
    "Text": closed({"prompt": STRING}),
    "Probe": closed(
        {"status": {"enum": ["ok", "unavailable"]}, "state": {"enum": [state.value for state in EngineState]}}
    ),
    "Version": closed({"version": STRING}),
    "MemoryReport": _told_from(MemoryReport, max_concurrency_at_max_len=NUMBER),
    "Memory": closed(
        {
            "memory": nullable(ref("MemoryReport")),
            "block_size": nullable(
                closed(
                    {
                        "present": COUNT,
                        "recommended": COUNT,
                        "saved_tokens": NUMBER,
                        "saved_bytes": INTEGER,
                        "present_cost": _COST,
                        "candidates": listed(_COST),
                        "requests": COUNT,
                        "prompt_lengths": _LENGTHS,
                        "output_lengths": _LENGTHS,
                    }
                )
            ),
            "lines": listed(STRING),
        }
    ),
    "State": closed(
        {
            "schema": COUNT,
            "version": STRING,
            "served_names": listed(STRING),
            "state": {"enum": [state.value for state in EngineState]},
            "state_reason": STRING,
            "snapshot_age_s": nullable(NUMBER),
            "uptime_s": NUMBER,
            "load": nullable(_LOAD),
            "memory": nullable(ref("MemoryReport")),
            "tuning": nullable(_told_from(TuningStatus)),
            "oom_seq": COUNT,
            "oom_events": listed(_told_from(OOMEvent)),
            "start_failures": listed(
                closed(
                    {
                        "time": STRING,
                        "reason": STRING,
                        "exit_code": INTEGER,
                        "utilization": RATIO,
                        "revision": COUNT,
                        "message": STRING,
                    }
                )
            ),
        }
    ),
}
