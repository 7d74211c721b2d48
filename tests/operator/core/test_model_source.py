"""`spec.model.source` taken apart."""

from __future__ import annotations

import pytest

from kvpilot_operator.core.model_source import ModelSource, parse_model_source
from kvpilot_operator.errors import InvalidSpecError


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://meta-llama/Llama-3.1-8B", ModelSource(model="hf://meta-llama/Llama-3.1-8B")),
        ("hf://a/b@refs/pr/1", ModelSource(model="hf://a/b@refs/pr/1")),
        ("hf://a/b-GGUF:Q4_K_M@v1", ModelSource(model="hf://a/b-GGUF:Q4_K_M@v1")),
        ("pvc://claim/dir/m.gguf", ModelSource(model="/var/lib/kvpilot/model/dir/m.gguf", claim="claim")),
        ("file:///opt/m.gguf", ModelSource(model="/opt/m.gguf")),
    ],
)
def test_source_is_taken_apart(source: str, expected: ModelSource) -> None:
    assert parse_model_source(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        *(
            "",
            "gpt2",
            "s3://b/m",
            "hf://",
            "hf:///a",
            "hf://gpt2",
            "hf://a/b/c",
            "hf://a@",
            "hf://a/b:@v1",
            "hf://--flag",
            "hf://a/b@v1\n--port",
        ),
        *("pvc://claim", "pvc://claim/", "pvc:///a", "pvc://c/../x"),
        *("file://a", "file:///", "file:////etc", "file:///a/../b"),
    ],
)
def test_what_can_not_be_understood_is_refused(source: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.model\.source"):
        parse_model_source(source)
