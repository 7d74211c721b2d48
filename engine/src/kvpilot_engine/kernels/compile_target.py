"""For which processor kernels are compiled: a level that many machines share, so that compiled code can be shipped.

numba's own choice is this very processor, by a name and some eighty features; code for it is of no use elsewhere. What
kernels gain from is the width of vectors and a few instructions, and those are named here. Changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

NAME_VARIABLE, FEATURES_VARIABLE = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"

_V2 = frozenset({"sse4.2", "ssse3", "popcnt", "cx16"})
_V3 = _V2 | {"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (("x86-64-v4", _V4), ("x86-64-v3", _V3), ("x86-64-v2", _V2))
_USED_BEYOND_LEVELS = ("amx-bf16", "amx-tile", "avx512bf16", "avx512vnni", "avxvnni")


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """In LLVM's words."""

    cpu_name: str
    features: str
    """What it has beyond its name: `+avx512vnni,…`."""


def choose_target(features: Mapping[str, bool]) -> CompileTarget | None:
    """The highest level that a processor with these features has; None: compile for it alone (not x86-64)."""
    for name, required in _LEVELS:
        if all(features.get(feature) for feature in required):
            extra = (feature for feature in _USED_BEYOND_LEVELS if features.get(feature))
            return CompileTarget(name, ",".join(f"+{feature}" for feature in extra))
    return None


def set_target(environ: MutableMapping[str, str]) -> CompileTarget | None:
    """Tell numba, which must not be imported yet, through `environ`; a target that the user has named stays."""
    if environ.get(NAME_VARIABLE):
        return CompileTarget(environ[NAME_VARIABLE], environ.get(FEATURES_VARIABLE, ""))
    from llvmlite import binding

    target = choose_target(binding.get_host_cpu_features())
    if target is not None:
        environ[NAME_VARIABLE], environ[FEATURES_VARIABLE] = target.cpu_name, target.features
    return target
