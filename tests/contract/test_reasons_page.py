"""The page of reasons names every reason of the code, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kvpilot_operator.core.reasons import Reason

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reasons.md"


def test_every_reason_is_explained_once() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(reason.value for reason in Reason)


def test_a_reason_is_one_camel_case_word() -> None:
    assert [reason for reason in Reason if not re.fullmatch(r"([A-Z][A-Za-z]+)", reason)] == []
