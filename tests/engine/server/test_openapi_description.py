"""The description at /openapi.json: every route of the application, valid, with the limits of the loaded model."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from prometheus_client import CollectorRegistry

from kvpilot_engine.server.app import create_app
from kvpilot_engine.server.error_mapping import CODES
from kvpilot_engine.server.openapi import build_description
from kvpilot_engine.server.openapi_bodies import BODIES, ModelLimits
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.testing import FakeModelLoader

DOCUMENT = build_description(ModelLimits(max_model_len=128, vocab_size=257, max_logprobs=20, served_names=("fake",)))


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_every_route_is_described_and_nothing_else() -> None:
    engine = AsyncEngine(FakeModelLoader(), ServiceSettings(max_num_seqs=8))
    app = create_app(engine, ServerSettings(served_names=("fake",)), CollectorRegistry())
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert served == {(method, path) for path, item in DOCUMENT["paths"].items() for method in item}


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    names = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert references(DOCUMENT) == names


def test_operations_have_names_of_their_own() -> None:
    ids = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", sorted(DOCUMENT["components"]["schemas"]))
def test_schemas_are_schemas(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "title" not in schema


@pytest.mark.parametrize("name", sorted(BODIES))
def test_bodies_have_the_fields_of_their_types(name: str) -> None:
    assert set(DOCUMENT["components"]["schemas"][name]["properties"]) == set(BODIES[name].model_fields)


GOOD: dict[str, Any] = {
    "model": "fake",
    "prompt": [[1, 2], [256]],
    "max_tokens": 128,
    "stop": ["a"] * 16,
    "logprobs": 20,
    "logit_bias": {"256": -100},
    "truncate_prompt_tokens": -1,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "other"},
        {"prompt": [257]},
        {"prompt": []},
        {"prompt": [-1]},
        {"max_tokens": 129},
        {"max_tokens": "5"},
        {"stop": ["a"] * 17},
        {"stop": ""},
        {"logprobs": 21},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1": 101}},
        {"temperature": 2.1},
        {"top_p": 0},
        {"repetition_penalty": 0},
        {"truncate_prompt_tokens": 0},
        {"n": 129},
        {"response_format": {"type": "xml"}},
    ],
)
def test_limits_are_those_of_the_server(wrong: dict[str, Any]) -> None:  # B13, B14
    assert validator("CompletionRequest").is_valid(GOOD)
    assert not validator("CompletionRequest").is_valid({**GOOD, **wrong})


def test_a_model_that_is_not_loaded_yet_sets_no_limits() -> None:
    schemas = build_description(ModelLimits())["components"]["schemas"]
    body = copy.deepcopy(GOOD) | {"max_tokens": 10**6, "prompt": [10**6], "model": "any"}
    jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/CompletionRequest", "components": {"schemas": schemas}}
    ).validate(body)


def test_error_codes_are_those_of_the_mapping() -> None:
    error = DOCUMENT["components"]["schemas"]["Error"]["properties"]["error"]
    assert set(error["properties"]["code"]["enum"]) == set(CODES)
