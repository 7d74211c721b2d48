"""Builds the tokenizer backend of a SentencePiece BPE vocabulary (Llama 2, Mistral, Gemma, Phi-3) from GGUF metadata.

GGUF holds tokens and scores but no merges: SentencePiece joins the neighbours whose joint token has the highest score.
The same order as a list of merges is every way to cut a token into two tokens, best token first.
Not here: unigram vocabularies (T5), which are cut by likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import normalizers
from tokenizers.models import BPE

_SPACE = "▁"


def build_sentencepiece_backend(
    tokens: Sequence[str], scores: Sequence[float], *, joinable: Sequence[bool], unknown: str | None, adds_space: bool
) -> tokenizers.Tokenizer:
    """`joinable` marks the tokens that text may become, control and byte tokens being none.

    adds_space: a space goes before the text, and before what follows a control token, as llama.cpp has it.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        BPE(
            vocabulary,
            _build_merges(tokens, scores, joinable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if adds_space else steps)
    return backend


def _build_merges(tokens: Sequence[str], scores: Sequence[float], joinable: Sequence[bool]) -> list[tuple[str, str]]:
    """Pairs of tokens whose joint text is a token, in falling order of its score."""
    usable = {token for token, is_joinable in zip(tokens, joinable, strict=True) if is_joinable}
    order = sorted((i for i in range(len(tokens)) if joinable[i]), key=lambda i: -scores[i])
    return [
        (token[:cut], token[cut:])
        for i in order
        for token in (tokens[i],)
        for cut in range(1, len(token))
        if token[:cut] in usable and token[cut:] in usable
    ]
