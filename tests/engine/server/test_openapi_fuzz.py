"""Requests generated from the description, good and bad: no 5xx, no hang, answers as described, the pool whole after.

make fuzz                        thousands of requests for each operation
KVPILOT_FUZZ_EXAMPLES=N, KVPILOT_FUZZ_SEED=S    how many, and which
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as hypothesis_seed
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.openapi import from_dict
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from kvpilot_engine.server.testing import make_byte_constraints
from kvpilot_engine.service.testing import FakeModelLoader

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = int(os.environ.get("KVPILOT_FUZZ_EXAMPLES", "100"))
"""Requests for each of the two modes of a generating operation; simple ones get a quarter."""
SEED = int(os.environ.get("KVPILOT_FUZZ_SEED", "4"))
ANSWER_LIMIT_S = 20.0
"""A request that takes longer hangs."""
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
DEADLINE = "x-request-timeout"
CHUNKS = {"/v1/chat/completions": "ChatCompletionChunk", "/v1/completions": "CompletionChunk"}


def check_stream(document: dict[str, Any], path: str, text: str, *, is_whole: bool) -> None:
    """Each event is a chunk as described, but for the end marker or one error at the end."""
    schema = {"$ref": f"#/components/schemas/{CHUNKS[path]}", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    events = [event[6:] for event in text.split("\n\n") if event.startswith("data: ")]
    assert events
    if is_whole:
        last = events.pop()
        assert last == "[DONE]" or set(json.loads(last)) == {"error"}
    for event in events:
        validator.validate(json.loads(event))


@dataclass(slots=True)
class Fuzzer:
    """Sends what is generated and checks what comes back; blocks."""

    document: dict[str, Any]
    url: str
    statuses: Counter[int] = field(default_factory=Counter)

    def run(self) -> None:
        description = from_dict(self.document)
        description.config.update(base_url=self.url)
        for result in description.get_all_operations():
            assert isinstance(result, Ok), result
            operation = result.ok()
            self._ask_many(operation, GenerationMode.POSITIVE, CHECKS)
            if operation.method.upper() == "POST":
                self._ask_many(operation, GenerationMode.NEGATIVE, [*CHECKS, negative_data_rejection])

    def _ask_many(self, operation: Any, mode: GenerationMode, checks: list[Any]) -> None:
        def ask(case: schemathesis.Case[Any]) -> None:
            response = case.call(timeout=ANSWER_LIMIT_S)
            self.statuses[response.status_code] += 1
            ran_out = response.status_code == 504 and case.headers and DEADLINE in case.headers
            # a client that asks for a nanosecond gets what it asked for
            case.validate_response(response, checks=[c for c in checks if not ran_out or c is not not_a_server_error])
            if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
                # the client hangs up on a stream of more than a hundred events: a test too
                is_whole = not response.stream_cut_short
                check_stream(self.document, operation.path, response.text, is_whole=is_whole)

        run = settings(
            max_examples=EXAMPLES if operation.method.upper() == "POST" else EXAMPLES // 4,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(hypothesis_seed(SEED)(given(case=operation.as_strategy(generation_mode=mode))(ask)))
        run()


async def test_generated_requests_leave_the_server_whole(start_shared: Any) -> None:
    kit = await start_shared(
        FakeModelLoader(make_constraints=make_byte_constraints),
        template="{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}@",
    )
    document = await (await kit.client.get("/openapi.json")).json()
    fuzzer = Fuzzer(document, str(kit.client.make_url("")).rstrip("/"))
    await asyncio.to_thread(fuzzer.run)
    assert fuzzer.statuses[200] > fuzzer.statuses.total() // 10, fuzzer.statuses
    await kit.until(lambda: kit.gauges() == (0, 0, 0))
    load = (await (await kit.client.get("/engine/state")).json())["load"]
    assert load["blocks_free"] + load["blocks_cached"] == load["blocks_total"]
    answer = await (await kit.chat(max_tokens=3)).json()
    assert answer["choices"][0]["message"]["content"] == "ABC"
