"""Greedy output of the real model equals an independent implementation's (see kvpilot_tools.oracle), token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FIXTURE = Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json"


@pytest.mark.model
def test_greedy_tokens_equal_the_reference_implementation(smollm2: Any) -> None:
    fixture = json.loads(FIXTURE.read_text(encoding="utf-8"))
    entries = fixture["entries"]
    assert len(entries) >= 5
    prompts = {number: entry["prompt_ids"] for number, entry in enumerate(entries)}
    run = smollm2.run(prompts, max_tokens=fixture["num_tokens"])
    assert run.tokens == {number: entry["output_ids"] for number, entry in enumerate(entries)}
