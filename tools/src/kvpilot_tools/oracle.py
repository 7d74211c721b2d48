"""Makes the greedy oracle: what transformers generates from the same GGUF file in float32, given our token ids.

    python -m kvpilot_tools.oracle MODEL.gguf tests/engine/fixtures/smollm2_greedy.json

Needs transformers and accelerate (not dependencies of the engine) and about 1.5 GB; takes a minute. Beside the ids it
keeps each prompt's smallest gap between the two best logits: where that is not far above float32 rounding, equality
would be luck.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvpilot_engine.text.model_text import load_tokenizer

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, the first humans landed on the Moon. The mission was called Apollo 11 and its commander was",
)


def generate(model_path: Path) -> list[dict[str, object]]:
    """One entry per prompt: text, prompt ids, output ids, smallest gap of the top two logits."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    entries: list[dict[str, object]] = []
    for prompt in PROMPTS:
        prompt_ids = [int(token) for token in tokenizer.encode(prompt, specials_as_text=False)]
        output_ids: list[int] = []
        smallest_gap = float("inf")
        inputs, cache = torch.tensor([prompt_ids]), None
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                result = model(inputs, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                best = result.logits[0, -1].topk(2)
                smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
                output_ids.append(int(best.indices[0]))
                inputs = torch.tensor([[output_ids[-1]]])
        entries.append(
            {
                "prompt": prompt,
                "prompt_ids": prompt_ids,
                "output_ids": output_ids,
                "smallest_gap": round(smallest_gap, 6),
            }
        )
        print(f"{smallest_gap:.4f}  {prompt[:40]!r}")
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    fixture = {"model": arguments.model.name, "num_tokens": NUM_TOKENS, "entries": generate(arguments.model)}
    arguments.output.write_text(json.dumps(fixture, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.output}: {len(PROMPTS)} prompts, {NUM_TOKENS} tokens each")


if __name__ == "__main__":
    main()
