"""Which files of a repository or folder make up one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.models.checkpoint_files import choose_files, choose_gguf
from kvpilot_engine.models.hub import HubReference
from kvpilot_engine.models.source import find_checkpoint, parse_source

SAFETENSORS = ["README.md", "config.json", "tokenizer.json", "model.safetensors", "original/model.safetensors", "x.bin"]
QUANTIZED = ["README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


def choose(names: list[str], variant: str | None = None) -> list[str]:
    return choose_files(names, variant=variant, origin="o/m")


def test_of_a_hugging_face_repository_the_root_folder_is_taken() -> None:
    assert choose(SAFETENSORS) == ["config.json", "tokenizer.json", "model.safetensors"]


def test_gguf_files_beside_safetensors_are_left_alone_unless_asked_for() -> None:
    names = [*SAFETENSORS, *QUANTIZED]
    assert choose(names) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert choose(names, "Q4_K_M") == ["config.json", "tokenizer.json", "m-Q4_K_M.gguf"]


def test_a_variant_is_found_by_its_whole_name_in_any_case_and_with_all_its_parts() -> None:
    assert choose(QUANTIZED, "q4_k_m") == ["m-Q4_K_M.gguf"]
    assert choose(QUANTIZED, "Q8_0") == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"none of its \.gguf files is Q4_K"):
        choose(QUANTIZED, "Q4_K")


def test_several_variants_are_listed_when_none_was_named() -> None:
    with pytest.raises(ModelNotFoundError, match=r"several .gguf files \(m-Q4_K_M, m-Q4_K_S, m-Q8_0\).*:Q4_K_M"):
        choose(QUANTIZED)


def test_a_missing_part_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf missing"):
        choose_gguf(["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"], variant=None, origin="o/m")


def test_a_vision_projector_is_no_model() -> None:
    assert choose(["mmproj-m-f16.gguf", "m.gguf"]) == ["m.gguf"]


@pytest.mark.parametrize(
    ("names", "found"),
    [(["pytorch_model.bin", "config.json"], "only .bin weights"), (["README.md"], "no weights")],
)
def test_unreadable_repositories_say_what_they_hold(names: list[str], found: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"{found}.*\.safetensors"):
        choose(names)


def test_a_folder_with_a_split_model_is_its_first_part(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05}-of-00002.gguf").touch()
    assert find_checkpoint(tmp_path) == tmp_path / "m-00001-of-00002.gguf"


def test_the_variant_stands_before_the_revision() -> None:
    assert parse_source("hf://o/m-GGUF:Q4_K_M@v1") == HubReference("o/m-GGUF", revision="v1", variant="Q4_K_M")
    assert parse_source("o/m-GGUF:Q8_0") == HubReference("o/m-GGUF", variant="Q8_0")
    assert str(HubReference("o/m", revision="v1", variant="Q8_0")) == "o/m:Q8_0@v1"
