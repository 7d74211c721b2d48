"""Tiny random models of every architecture, written and computed by transformers; our decoder over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpilot_engine.layers.attention import AttentionMetadata, empty_layer_kv
from kvpilot_engine.layers.linear import padded_rows
from kvpilot_engine.layers.torch_attention import TorchAttention
from kvpilot_engine.models.torch_decoder import TorchDecoder, attention_shape, load_torch_decoder
from kvpilot_engine.models.weights import open_weights

VOCABULARY = 301
WINDOW = 24
PROMPT_LENGTH = 90
"""Longer than every window and than the original context of scaled models."""
NEW_TOKENS = 12
MAX_POSITIONS = 256

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WITHOUT_HEAD_DIM = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"num_attention_heads": 6}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_SCALING = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
}
SLIDING, FULL = "sliding_attention", "full_attention"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON | {"attention_bias": True, "rope_theta": 50000.0}),
    "llama3-scaling": ("LlamaConfig", COMMON | {"rope_parameters": LLAMA3_SCALING, "tie_word_embeddings": True}),
    "llama-linear": ("LlamaConfig", COMMON | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", COMMON | {"sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2Config",
        WITHOUT_HEAD_DIM | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", COMMON | {"attention_bias": True}),
    "gemma2": ("Gemma2Config", COMMON | {"sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        COMMON
        | {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 9.0,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3Config", WITHOUT_HEAD_DIM | {"sliding_window": WINDOW}),
    "phi3-long": (
        "Phi3Config",
        WITHOUT_HEAD_DIM | {"original_max_position_embeddings": 64, "rope_parameters": LONG_SCALING},
    ),
}


@dataclass(frozen=True)
class Reference:
    """A model as transformers writes and computes it."""

    folder: Path
    prompt: list[int]
    logits: np.ndarray[Any, Any]
    """[prompt, vocabulary]"""
    greedy: list[int]
    weights: Mapping[str, Tensor]
    """By Hugging Face name."""
    short_logits: np.ndarray[Any, Any]
    """[60, vocabulary] of the first 60 tokens alone."""


def draw_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def make_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """make(name of a model above); each is made once."""

    @cache
    def make(name: str) -> Reference:
        # here: it takes seconds to import
        import transformers

        torch.set_num_threads(1)
        class_name, values = MODELS[name]
        config = getattr(transformers, class_name)(**values)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(11)
        with torch.inference_mode():
            for parameter_name, parameter in model.named_parameters():
                is_norm = parameter_name.endswith("norm.weight")
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if is_norm else 0.15))
                if is_norm and not class_name.startswith("Gemma"):
                    parameter += 1.0
                if "embed_tokens" in parameter_name and config.tie_word_embeddings:
                    # or each token is followed by itself
                    parameter *= 0.2
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        prompt = draw_tokens(1, PROMPT_LENGTH)

        def compute(tokens: list[int]) -> Tensor:
            with torch.inference_mode():
                return torch.as_tensor(model(torch.tensor([tokens]), use_cache=False).logits[0])

        logits, tokens = compute(prompt), list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(compute(tokens)[-1].argmax()))
        return Reference(
            folder=folder,
            prompt=prompt,
            logits=logits.numpy(),
            greedy=tokens[PROMPT_LENGTH:],
            weights=dict(model.state_dict()),
            short_logits=compute(prompt[:60]).numpy(),
        )

    return make


class PagedDecoder:
    """Our decoder over a paged cache whose unused slots hold NaN, with blocks in no order.

    Blocks that lie wholly before every layer's window are taken away before a step, as the scheduler does.
    """

    def __init__(self, path: Path, *, max_positions: int = MAX_POSITIONS, block_size: int = 8) -> None:
        torch.set_num_threads(1)
        with open_weights(path) as source:
            self.decoder: TorchDecoder = load_torch_decoder(source, max_positions=max_positions)
        self._block_size = block_size
        shape = attention_shape(self.decoder.config)
        self._attention = TorchAttention(shape)
        num_blocks = 120
        self._kv = tuple(empty_layer_kv(num_blocks, shape, block_size) for _ in self.decoder.config.layers)
        for layer in self._kv:
            layer.keys[1:].fill_(float("nan"))
            layer.values[1:].fill_(float("nan"))
        self._free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1).tolist()
        self._poisoned = self._free.pop()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, chunks: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Compute the next tokens of some sequences together; logits of each row by sequence."""
        slots, positions, ends = [], [], [0]
        for number, tokens in chunks.items():
            start = self._lengths.get(number, 0)
            table = self._tables.setdefault(number, [])
            while len(table) * self._block_size < start + len(tokens):
                table.append(self._free.pop())
            window = self.decoder.config.window
            for index in range(0 if window is None else max(0, start - window + 1) // self._block_size):
                table[index] = self._poisoned
            place = range(start, start + len(tokens))
            slots += [table[p // self._block_size] * self._block_size + p % self._block_size for p in place]
            positions += list(place)
            ends.append(len(positions))
            self._lengths[number] = start + len(tokens)
        padding = [0] * (padded_rows(len(positions)) - len(positions))
        longest = max(len(self._tables[number]) for number in chunks)
        metadata = AttentionMetadata(
            query_start=torch.tensor(ends),
            seq_lens=torch.tensor([self._lengths[number] for number in chunks]),
            block_tables=torch.tensor([(self._tables[number] + [0] * longest)[:longest] for number in chunks]),
            slot_mapping=torch.tensor(slots),
            block_size=self._block_size,
        )
        with torch.inference_mode():
            token_ids = torch.tensor([token for tokens in chunks.values() for token in tokens] + padding)
            plan = self._attention.plan(metadata)
            hidden = self.decoder.forward(token_ids, torch.tensor(positions + padding), self._kv, self._attention, plan)
            logits = self.decoder.compute_logits(hidden[: len(positions)])
        return {number: logits[ends[i] : ends[i + 1]] for i, number in enumerate(chunks)}

    def compute(self, tokens: list[int], *chunk_sizes: int) -> Tensor:
        """Logits of all rows of a new sequence, computed in chunks of these sizes and a last one."""
        number, rows, start = len(self._lengths), [], 0
        for size in (*chunk_sizes, len(tokens) - sum(chunk_sizes)):
            rows.append(self.step({number: tokens[start : start + size]})[number])
            start += size
        return torch.cat(rows)

    def generate(self, prompts: Mapping[int, list[int]], count: int) -> tuple[dict[int, list[int]], dict[int, Tensor]]:
        """Greedy tokens of these prompts together, and every row's logits."""
        pending: dict[int, list[int]] = dict(prompts)
        tokens: dict[int, list[int]] = {number: [] for number in prompts}
        rows: dict[int, list[Tensor]] = {number: [] for number in prompts}
        for _ in range(count):
            for number, logits in self.step(pending).items():
                rows[number].append(logits)
                tokens[number].append(int(logits[-1].argmax()))
            pending = {number: [generated[-1]] for number, generated in tokens.items()}
        return tokens, {number: torch.cat(kept) for number, kept in rows.items()}


@pytest.fixture(scope="session")
def open_paged() -> Callable[..., PagedDecoder]:
    return PagedDecoder
