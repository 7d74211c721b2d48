"""Which architectures there are: one line per model. An unknown one is refused with the list of those."""

from __future__ import annotations

from collections.abc import Iterable

from kvpilot_engine.errors import SettingsError
from kvpilot_engine.models.architecture import Architecture
from kvpilot_engine.models.gemma2 import GEMMA2
from kvpilot_engine.models.gemma3 import GEMMA3
from kvpilot_engine.models.llama import LLAMA
from kvpilot_engine.models.mistral import MISTRAL
from kvpilot_engine.models.phi3 import PHI3
from kvpilot_engine.models.qwen2 import QWEN2
from kvpilot_engine.models.qwen3 import QWEN3

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    PHI3,
)


def find_hf_architecture(class_names: Iterable[str], *, origin: str) -> Architecture:
    """The architecture of a config.json by its `architectures`."""
    named = list(map(str, class_names))
    for architecture in ARCHITECTURES:
        if set(named) & set(architecture.hf_classes):
            return architecture
    supported = ", ".join(name for architecture in ARCHITECTURES for name in architecture.hf_classes)
    raise SettingsError(
        [f"{origin}: architecture {', '.join(named) or 'none'} is not supported (supported: {supported})"]
    )


def find_gguf_architecture(name: str, *, origin: str) -> Architecture:
    """The architecture of a GGUF file by its general.architecture."""
    for architecture in ARCHITECTURES:
        if architecture.gguf_architecture == name:
            return architecture
    supported = ", ".join(a.gguf_architecture for a in ARCHITECTURES if a.gguf_architecture is not None)
    raise SettingsError([f"{origin}: architecture {name} is not supported in GGUF files (supported: {supported})"])
