"""Small tokenizers and model texts for tests: real ones, only with a vocabulary that fits in the head.

    ids 0..255 the bytes | then the merged tokens | then the control tokens

Not here: anything that needs a model's files.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvpilot_engine.core.grammar import TokenConstraint
from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.text.byte_level import BYTE_TO_CHARACTER, byte_level_bytes
from kvpilot_engine.text.chat_template import ChatTemplate
from kvpilot_engine.text.model_text import GenerationDefaults, ModelText
from kvpilot_engine.text.tokenizer import Tokenizer, TokenizerPolicy

CONTROL_TEXTS = ("<|bos|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TOOL_CONTROL_TEXTS = (*CONTROL_TEXTS, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHOWN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "HOW<|im_end|>\n{% endif %}"
)


def _make_tool_template(how: str, call: str) -> str:
    """A template that lists the tools, says how to call them, and writes the calls of the history."""
    return _SHOWN_TOOLS.replace("HOW", how) + _TURNS.replace("CALL", call)


_CALL_OBJECT = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
TOOL_TEMPLATES = {
    "hermes": _make_tool_template(
        "To call one, write <tool_call>a JSON object</tool_call>.",
        "<tool_call>\n" + _CALL_OBJECT.replace("KEY", "arguments") + "\n</tool_call>",
    ),
    "llama3_json": _make_tool_template(
        "Environment: ipython. To call one, answer with a JSON object.", _CALL_OBJECT.replace("KEY", "parameters")
    ),
    "mistral": _make_tool_template(
        "To call one, write [TOOL_CALLS] and a list.", "[TOOL_CALLS][" + _CALL_OBJECT.replace("KEY", "arguments") + "]"
    ),
    "mistral_v11": _make_tool_template(
        "To call one, write [TOOL_CALLS], its name, [ARGS] and a JSON object.",
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    ),
    "json": _make_tool_template("To call one, answer with a JSON object.", _CALL_OBJECT.replace("KEY", "arguments")),
}
"""By the name of the dialect that they are written in."""


def make_tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool | None = None) -> dict[str, Any]:
    """A tool as a client writes it."""
    function = {"name": name, "parameters": parameters, "strict": strict, "description": f"Does {name}."}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def make_tokenizer(
    *,
    merged: Iterable[bytes] = (),
    control_texts: Iterable[str] = CONTROL_TEXTS,
    adds_bos: bool = False,
    user_defined_texts: Iterable[str] = (),
) -> Tokenizer:
    """Build a byte-level BPE; each of `merged` becomes a token, joined from its bytes left to right."""
    vocabulary = {BYTE_TO_CHARACTER[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for token in merged:
        letters = [BYTE_TO_CHARACTER[byte] for byte in token]
        for end in range(2, len(letters) + 1):
            whole = "".join(letters[:end])
            if whole not in vocabulary:
                vocabulary[whole] = len(vocabulary)
                merges.append(("".join(letters[: end - 1]), letters[end - 1]))
    backend = tokenizers.Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in control_texts])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in user_defined_texts])

    def find(text: str) -> TokenId | None:
        token_id = backend.token_to_id(text)
        return None if token_id is None else TokenId(token_id)

    bos_id, eos_id = find("<|bos|>"), find("<|im_end|>")
    return Tokenizer(
        backend,
        to_bytes=byte_level_bytes,
        policy=TokenizerPolicy(
            bos_id=bos_id,
            eos_id=eos_id,
            adds_bos=adds_bos,
            end_ids=frozenset() if eos_id is None else frozenset({eos_id}),
            named_specials={"bos_token": "<|bos|>", "eos_token": "<|im_end|>"},
        ),
    )


def make_model_text(
    template: str | None = CHATML_TEMPLATE,
    *,
    tokenizer: Tokenizer | None = None,
    generation_defaults: GenerationDefaults | None = None,
    **template_options: Any,
) -> ModelText:
    """Bundle a tokenizer and a template; `template_options` go to ChatTemplate."""
    tokenizer = tokenizer or make_tokenizer()
    chat_template = None
    if template is not None:
        chat_template = ChatTemplate(
            template,
            named_specials=tokenizer.policy.named_specials,
            special_texts=tokenizer.special_texts,
            **template_options,
        )
    return ModelText(
        tokenizer=tokenizer,
        chat_template=chat_template,
        generation_defaults=generation_defaults or GenerationDefaults(),
    )


def read_mask(constraint: TokenConstraint) -> list[TokenId]:
    """The tokens that a constraint allows next."""
    mask = constraint.compute_mask()
    assert isinstance(mask, np.ndarray)
    return [TokenId(int(i)) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def sample_randomly(constraint: TokenConstraint, *, seed: int, max_tokens: int) -> list[TokenId]:
    """A model that knows nothing: every allowed token is as likely. Stops when the grammar is complete."""
    generator = random.Random(seed)  # noqa: S311
    output: list[TokenId] = []
    while len(output) < max_tokens and not constraint.is_complete:
        output.append(generator.choice(read_mask(constraint)))
        constraint.accept(output[-1])
    return output
