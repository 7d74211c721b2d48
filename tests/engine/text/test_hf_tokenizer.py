"""Hugging Face folders, written here with the `tokenizers` library and compared with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from kvpilot_engine.errors import ModelNotFoundError, SettingsError
from kvpilot_engine.text.byte_level import BYTE_TO_CHARACTER
from kvpilot_engine.text.model_text import GenerationDefaults, load_model_text, load_tokenizer

SPM_TEXTS = st.lists(st.sampled_from(["<s>", "</s>", "a", "b", " ", "  ", "é", "▁", "\n"]), max_size=8).map("".join)


def _build_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(BPE({character: byte for byte, character in BYTE_TO_CHARACTER.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|eos|>"])
    backend.add_tokens(["<｜User｜>", "<think>"])
    return backend


def _build_sentencepiece(*, legacy: bool) -> tokenizers.Tokenizer:
    """Llama 2 prepends a space to every part (in its normalizer), Mistral's newer files only to the first."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab"]
    backend = tokenizers.Tokenizer(
        BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("▁", "b"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    return backend


def _write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_byte_level_folder_is_read_with_its_configs(tmp_path: Path) -> None:
    text = load_model_text(
        _write_folder(
            tmp_path,
            _build_byte_level(),
            tokenizer_config={
                "bos_token": {"content": "<|bos|>", "lstrip": False},
                "eos_token": "<|eos|>",
                "add_bos_token": True,
                "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
            },
            generation_config={"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [257, 3]},
        )
    )
    assert text.generation_defaults == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert text.end_token_ids == {257, 3}
    assert text.encode_chat([{"role": "user", "content": "é"}]) == [256, *"é".encode(), 257]
    assert text.encode_prompt("x") == [256, ord("x")]
    assert text.tokenizer.decode([256, *b"x"]) == "<|bos|>x"  # type: ignore[list-item]


def test_sampling_defaults_can_be_switched_off_or_taken_from_elsewhere(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path, _build_byte_level(), generation_config={"temperature": 0.6, "eos_token_id": [257]})
    off = load_model_text(folder, generation_config="none")
    assert off.generation_defaults == GenerationDefaults()
    assert off.end_token_ids == {257}, "where the model ends is no default"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(
        SettingsError, match=r"--generation-config is .*other: .* a folder that holds generation_config"
    ):
        load_model_text(folder, generation_config=str(other))
    (other / "generation_config.json").write_text('{"min_p": 0.05, "repetition_penalty": 1.1}', encoding="utf-8")
    elsewhere = load_model_text(folder, generation_config=str(other))
    assert elsewhere.generation_defaults == GenerationDefaults(min_p=0.05, repetition_penalty=1.1)


def test_defaults_without_configs_are_those_of_the_api(tmp_path: Path) -> None:
    text = load_model_text(_write_folder(tmp_path, _build_byte_level()))
    assert text.generation_defaults == GenerationDefaults(temperature=1.0, top_p=1.0, top_k=0)
    assert text.chat_template is None
    assert text.end_token_ids == frozenset()
    assert not text.tokenizer.policy.adds_bos


def test_the_post_processor_tells_whether_a_bos_is_added(tmp_path: Path) -> None:  # B11
    backend = _build_byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    text = load_model_text(_write_folder(tmp_path, backend, tokenizer_config={"bos_token": "<|bos|>"}))
    assert text.encode_prompt("x") == [256, ord("x")]
    assert text.encode_prompt("<|bos|>x") == [256, ord("x")]


def test_tokens_that_look_like_control_tokens_are_control_tokens(tmp_path: Path) -> None:  # B12
    tokenizer = load_tokenizer(_write_folder(tmp_path, _build_byte_level()))
    assert tokenizer.encode("<｜User｜>", specials_as_text=False) == [258]
    assert tokenizer.encode("<｜User｜>", specials_as_text=True) == list("<｜User｜>".encode())
    assert tokenizer.encode("<think>", specials_as_text=True) == [259]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = _build_byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(_write_folder(tmp_path, backend)).encode("abcd", specials_as_text=True)) == 4


@pytest.mark.parametrize("legacy", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=SPM_TEXTS)
def test_sentencepiece_folders_encode_like_the_library(tmp_path: Path, legacy: bool, text: str) -> None:
    backend = _build_sentencepiece(legacy=legacy)
    tokenizer = load_tokenizer(_write_folder(tmp_path, backend))
    assert tokenizer.encode(text, specials_as_text=False) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_text_comes_back(tmp_path: Path, legacy: bool) -> None:
    tokenizer = load_tokenizer(_write_folder(tmp_path, _build_sentencepiece(legacy=legacy)))
    assert tokenizer.decode(tokenizer.encode("a é\nb", specials_as_text=True)) == "a é\nb"


def test_chat_templates_are_found_in_each_place(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = _write_folder(tmp_path, _build_byte_level(), tokenizer_config={"chat_template": several})
    message = {"role": "user", "content": "x"}
    assert bytes(load_model_text(folder).encode_chat([message])) == b"D"
    (folder / "chat_template.jinja").write_text("J")
    assert bytes(load_model_text(folder).encode_chat([message])) == b"J"
    (folder / "mine.jinja").write_text("M{{ messages[0].content }}")
    text = load_model_text(folder, chat_template_path=folder / "mine.jinja")
    assert bytes(text.encode_chat([message])) == b"Mx"


def test_a_tokenizer_of_its_own_folder_stands_in(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path, _build_byte_level(), tokenizer_config={"chat_template": "T"})
    text = load_model_text(tmp_path / "elsewhere", tokenizer_path=folder)
    assert text.tokenizer.vocab_size == 260
    assert text.chat_template is not None


def test_a_template_file_that_is_not_there_is_a_bad_setting(tmp_path: Path) -> None:
    folder = _write_folder(tmp_path, _build_byte_level())
    with pytest.raises(SettingsError, match="--chat-template"):
        load_model_text(folder, chat_template_path=tmp_path / "absent.jinja")


def test_a_path_without_a_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="absent"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError, match="found: neither"):
        load_tokenizer(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "not valid JSON"), ("[]", "object is expected"), ("{}", "can read"), ('{"model": 1}', "can read")],
)
def test_a_broken_tokenizer_file_is_an_error_that_names_it(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SettingsError, match=named) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(error.value)


def test_an_unknown_decoder_is_an_error_that_names_it(tmp_path: Path) -> None:
    backend = _build_byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(SettingsError, match="WordPiece"):
        load_tokenizer(_write_folder(tmp_path, backend))


def test_a_broken_gguf_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SettingsError, match=r"model\.gguf"):
        load_tokenizer(tmp_path)
