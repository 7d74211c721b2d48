"""The reference of supported models says what the registry does."""

from __future__ import annotations

import re
from pathlib import Path

from kvpilot_engine.models.registry import ARCHITECTURES
from kvpilot_engine.models.weight_source import StorageType

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"


def test_the_table_lists_each_architecture_once_and_no_other() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "For" in line]
    listed = {row[0]: (set(re.findall(r"`(\w+)`", row[1])), row[2]) for row in rows if len(row) == 4}
    assert listed.keys() == {architecture.title for architecture in ARCHITECTURES}
    for architecture in ARCHITECTURES:
        classes, gguf_name = listed[architecture.title]
        assert classes == set(architecture.hf_classes)
        if architecture.gguf_architecture is not None:
            assert gguf_name == f"`{architecture.gguf_architecture}`"


def test_the_types_kept_as_stored_are_all_named() -> None:
    kept = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if "kept as stored" in line)
    assert {kind.strip() for kind in kept.split("|")[2].split(",")} == {kind.value for kind in StorageType}
