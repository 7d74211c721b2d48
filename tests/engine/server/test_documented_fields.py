"""The contract names every field that a body may have, and every one that is refused or has no effect."""

from __future__ import annotations

import re
from pathlib import Path

from kvpilot_engine.server.openai_schema import ChatCompletionBody, CompletionBody
from kvpilot_engine.server.sampling_fields import WITHOUT_EFFECT, GenerationBody

TEXT = (Path(__file__).parents[3] / "docs" / "contracts" / "engine-http.md").read_text(encoding="utf-8")
REQUESTS = TEXT[TEXT.index("## Requests") : TEXT.index("## Answers")]
LISTED = set(re.findall(r"`([a-z_]+)`", REQUESTS))


def names_in_tables() -> set[str]:
    fields = REQUESTS[: REQUESTS.index("### Structured output")]
    rows = re.findall(r"^\| ((?:`[a-z_]+`(?:, )?)+) \|", fields, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def test_tables_have_exactly_the_fields_of_the_bodies() -> None:
    assert names_in_tables() == set(ChatCompletionBody.model_fields) | set(CompletionBody.model_fields)


def test_refused_and_idle_fields_are_listed() -> None:
    refused = set(GenerationBody.not_supported) | set(CompletionBody.not_supported)
    own = set(ChatCompletionBody.model_fields)
    assert (refused - own) <= LISTED
    assert WITHOUT_EFFECT <= LISTED
