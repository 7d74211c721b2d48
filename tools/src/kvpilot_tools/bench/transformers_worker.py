"""transformers' generate with static batches, in a process and an environment of its own.

    python transformers_worker.py FOLDER THREADS

Reads one JSON object a line, `{"prompts": [[ids]], "outputs": [n], "dtype": "float32"}`, and answers each with
`{"seconds": …}`: the time in which every prompt of the batch got the longest of the outputs, since a static batch ends
with its last row. The first line that it writes tells that both dtypes are loaded. Imports nothing of ours: its
environment has transformers and torch alone.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    models: dict[str, Any] = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name))
        for name in ("float32", "bfloat16")
    }
    print(json.dumps({"ready": sorted(models)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        width = max(len(prompt) for prompt in asked["prompts"])
        pad = [width - len(prompt) for prompt in asked["prompts"]]
        ids = torch.tensor([[0] * gap + prompt for gap, prompt in zip(pad, asked["prompts"], strict=True)])
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in pad])
        longest = max(asked["outputs"])
        started = time.perf_counter()
        with torch.inference_mode():
            models[asked["dtype"]].generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
