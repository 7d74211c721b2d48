"""Which instructions multiply small integers on this machine. Nothing else of a kernel depends on the machine by name.

Looked up when the first kernel is compiled, not at import. The environment variable KVPILOT_CPU_DOT forces a path
(`avx512_vnni`, `avx_vnni`, `avx2`, `plain`), for tests and for finding faults; results are the same on each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from functools import cache

from kvpilot_engine.errors import SettingsError

DOT_VARIABLE = "KVPILOT_CPU_DOT"


class DotPath(StrEnum):
    """How sums of four products of bytes are computed, fastest first."""

    AVX512_VNNI = "avx512_vnni"
    AVX_VNNI = "avx_vnni"
    AVX2 = "avx2"
    PLAIN = "plain"


_REQUIRED_FEATURES: dict[DotPath, frozenset[str]] = {
    DotPath.AVX512_VNNI: frozenset({"avx512f", "avx512bw", "avx512vnni"}),
    DotPath.AVX_VNNI: frozenset({"avx2", "fma", "avxvnni"}),
    DotPath.AVX2: frozenset({"avx2", "fma"}),
    DotPath.PLAIN: frozenset(),
}


def choose_dot_path(features: Mapping[str, bool], forced: str | None) -> DotPath:
    """The fastest path that the features allow, or the forced one. SettingsError when that can't run here."""
    able = [path for path, required in _REQUIRED_FEATURES.items() if all(features.get(name) for name in required)]
    if not forced:
        return able[0]
    if forced not in list(DotPath):
        raise SettingsError([f"{DOT_VARIABLE}={forced}: not one of {', '.join(DotPath)}"])
    path = DotPath(forced)
    if path not in able:
        missing = sorted(name for name in _REQUIRED_FEATURES[path] if not features.get(name))
        raise SettingsError([f"{DOT_VARIABLE}={forced}: this processor lacks {', '.join(missing)}"])
    return path


@cache
def dot_path() -> DotPath:
    """This process's path."""
    from llvmlite import binding  # here, so that the name of the variable costs nothing

    return choose_dot_path(binding.get_host_cpu_features(), os.environ.get(DOT_VARIABLE))
