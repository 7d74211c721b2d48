"""Writes the tokenizer fixtures: what llama.cpp makes of the stress strings.

llama-cpp-python is no dependency of the project; to make the fixtures anew, in an environment with this package:

    pip install llama-cpp-python==0.3.36
    python -m kvpilot_tools.tokenizer_oracle model MODEL.gguf tests/engine/fixtures/smollm2-tokenizer.json.gz
    python -m kvpilot_tools.tokenizer_oracle pre-types tests/engine/fixtures/pre-tokenizers.json.gz
    python -m kvpilot_tools.tokenizer_oracle sentencepiece tests/engine/fixtures/sentencepiece.json.gz

`model` takes a real model's vocabulary: for each string the ids with control tokens as text and, where they differ,
with control tokens parsed. `pre-types` takes a vocabulary made for the purpose, whose merges cross every border that a
pre-tokenizer can draw, so that the ids show where it drew them. `sentencepiece` takes another made-up vocabulary, with
scores instead of merges, and both ways to treat the space before a text. All need what kvpilot-engine depends on.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import hashlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from kvpilot_tools.tokenizer_stress import build_strings

if TYPE_CHECKING:
    from llama_cpp import Llama  # only where fixtures are made

PRE_TYPES = ("gpt-2", "llama-bpe", "qwen2", "smollm")
_CROSSING_VOCAB_SIZE = 6000
_LONGEST_PIECE_BYTES = 1024


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model")
    model.add_argument("model", type=Path, help="GGUF file")
    model.add_argument("output", type=Path, help="fixture to write (.json.gz)")
    commands.add_parser("pre-types").add_argument("output", type=Path, help="fixture to write (.json.gz)")
    commands.add_parser("sentencepiece").add_argument("output", type=Path, help="fixture to write (.json.gz)")
    arguments = parser.parse_args()
    if arguments.command == "model":
        fixture = build_model_fixture(arguments.model)
    else:
        fixture = build_pre_type_fixture() if arguments.command == "pre-types" else build_sentencepiece_fixture()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(gzip.compress(json.dumps(fixture, separators=(",", ":")).encode(), mtime=0))
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


def build_model_fixture(model_path: Path) -> dict[str, Any]:
    """Ask llama.cpp about every string and every token of a model."""
    llama = _load(model_path)
    ids = range(llama.n_vocab())
    pieces = [_get_piece(llama, i) for i in ids]
    control_ids = [i for i in ids if _ask_vocab(llama, "is_control", i)]
    cases = []
    for text in build_strings([pieces[i].decode() for i in control_ids]):
        plain, parsed = _tokenize(llama, text, parse_special=False), _tokenize(llama, text, parse_special=True)
        cases.append([text, plain] if plain == parsed else [text, plain, parsed])
    return {
        "source": f"{_name_source()}, {model_path.name}",
        "vocab_size": len(ids),
        "token_bytes_sha256": hashlib.sha256(b"\0".join(pieces)).hexdigest(),
        "control_ids": control_ids,
        "end_ids": [i for i in ids if _ask_vocab(llama, "is_eog", i)],
        "cases": cases,
    }


def build_pre_type_fixture() -> dict[str, Any]:
    """Tokenize every string with each pre-tokenizer that kvpilot_engine knows, over one made-up vocabulary."""
    strings = build_strings([])
    tokens, merges = _train_crossing_vocabulary(strings)
    ids_by_type = {}
    for pre_type in PRE_TYPES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            _write_vocabulary(path, pre_type, tokens, merges)
            llama = _load(path)
            ids_by_type[pre_type] = [_tokenize(llama, text, parse_special=False) for text in strings]
    return {"source": _name_source(), "tokens": tokens, "merges": merges, "strings": strings, "ids": ids_by_type}


def build_sentencepiece_fixture() -> dict[str, Any]:
    """Tokenize every string with a SentencePiece vocabulary, with and without a space before the text."""
    specials = ["<s>", "</s>"]
    strings = build_strings(specials)
    tokens, types = _train_sentencepiece_vocabulary(strings, specials)
    scores = [0.0 if kind != gguf.TokenType.NORMAL else -float(i) for i, kind in enumerate(types)]
    cases: dict[str, list[list[Any]]] = {}
    for adds_space in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_tokenizer_model("llama")
            writer.add_token_list(tokens)
            writer.add_token_scores(scores)
            writer.add_token_types(types)
            writer.add_add_space_prefix(adds_space)
            _finish(writer)
            llama = _load(path)
            cases["space" if adds_space else "no space"] = [
                [_tokenize(llama, text, parse_special=False), _tokenize(llama, text, parse_special=True)]
                for text in strings
            ]
    return {
        "source": _name_source(),
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "scores": scores,
        "strings": strings,
        "ids": cases,
    }


def _train_sentencepiece_vocabulary(strings: list[str], specials: list[str]) -> tuple[list[str], list[gguf.TokenType]]:
    """Control tokens, all bytes, one user-defined token, then pieces in falling order of score."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=_CROSSING_VOCAB_SIZE, limit_alphabet=300, max_token_length=16, show_progress=False
    )
    tokenizer.train_from_iterator([f" {text}".replace(" ", "▁") for text in strings], trainer)
    vocabulary = tokenizer.get_vocab()
    # an alphabet comes first in training; SentencePiece gives single characters the lowest scores
    pieces = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    tokens = ["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256)), "[user]"]
    pieces = [piece for piece in pieces if piece not in tokens and not any(text in piece for text in specials)]
    tokens += pieces
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * len(specials), *[gguf.TokenType.BYTE] * 256]
    types += [gguf.TokenType.USER_DEFINED, *[gguf.TokenType.NORMAL] * len(pieces)]
    return tokens, types


def _train_crossing_vocabulary(strings: list[str]) -> tuple[list[str], list[str]]:
    """Train without borders, so that tokens hold digits with letters, spaces with words, and so on."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_CROSSING_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(strings, trainer)
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(merge) for merge in merges]


def _write_vocabulary(path: Path, pre_type: str, tokens: list[str], merges: list[str]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_type)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _load(path: Path) -> Llama:
    from llama_cpp import Llama

    return Llama(str(path), vocab_only=True, verbose=False)


def _name_source() -> str:
    return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"


def _tokenize(llama: Llama, text: str, *, parse_special: bool) -> list[int]:
    return [int(i) for i in llama.tokenize(text.encode(), add_bos=False, special=parse_special)]


def _ask_vocab(llama: Llama, question: str, token_id: int) -> bool:
    import llama_cpp

    return bool(getattr(llama_cpp, f"llama_vocab_{question}")(llama._model.vocab, token_id))


def _get_piece(llama: Llama, token_id: int) -> bytes:
    """The package's own method cuts off at 32 bytes."""
    import llama_cpp

    buffer = (ctypes.c_char * _LONGEST_PIECE_BYTES)()
    length = llama_cpp.llama_token_to_piece(llama._model.vocab, token_id, buffer, len(buffer), 0, True)
    return buffer.raw[:length]


if __name__ == "__main__":
    main()
