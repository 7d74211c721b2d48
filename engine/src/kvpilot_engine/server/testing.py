"""A tiny ModelText for server tests: token ids are byte values, as in `service.testing`; the template is one line."""

from __future__ import annotations

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.service.testing import END, VOCAB_SIZE
from kvpilot_engine.text.byte_level import BYTE_TO_CHARACTER, byte_level_bytes
from kvpilot_engine.text.chat_template import ChatTemplate
from kvpilot_engine.text.constraints import GrammarCompiler
from kvpilot_engine.text.model_text import GenerationDefaults, ModelText
from kvpilot_engine.text.tokenizer import Tokenizer, TokenizerPolicy

END_TEXT = "<|end|>"


def make_byte_text(*, template: str | None = "{% for m in messages %}{{ m.content }}{% endfor %}") -> ModelText:
    """One token per byte. The prompt's last character decides the answer: after `@` comes the alphabet."""
    vocabulary = {BYTE_TO_CHARACTER[value]: value for value in range(256)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([tokenizers.AddedToken(END_TEXT, special=True, normalized=False)])
    policy = TokenizerPolicy(eos_id=END, end_ids=frozenset({TokenId(END)}), named_specials={"eos_token": END_TEXT})
    tokenizer = Tokenizer(backend, to_bytes=byte_level_bytes, policy=policy)
    chat = None
    if template is not None:
        chat = ChatTemplate(template, named_specials={}, special_texts=tokenizer.special_texts)
    return ModelText(tokenizer=tokenizer, chat_template=chat, generation_defaults=GenerationDefaults(temperature=0.0))


def make_byte_constraints() -> GrammarCompiler:
    """Grammars over that vocabulary, for FakeModelLoader."""
    return GrammarCompiler(lambda: make_byte_text().tokenizer, num_logits=VOCAB_SIZE)
