"""Which instructions multiply on this machine. Nothing else of a kernel depends on the machine by name.

Linears are bfloat16 tiles where the processor has AMX for them, else sums of products of bytes by one of several paths,
whose results are the same. Looked up when the first kernel is compiled, not at import. The environment variable
KVPILOT_CPU_DOT forces bytes and a path (`avx512_vnni`, `avx_vnni`, `avx2`, `plain`), for tests and for finding faults.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
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


def choose_tiles(features: Mapping[str, bool], forced: str | None, *, is_permitted: bool) -> bool:
    """Whether linears multiply by AMX: it is there, the kernel permits it, and no path is forced."""
    has_tiles = all(features.get(name) for name in ("amx-bf16", "amx-tile", "avx512bf16"))
    is_fastest = choose_dot_path(features, None) is DotPath.AVX512_VNNI
    return has_tiles and is_fastest and is_permitted and not forced


_PERMIT_STATE, _TILE_STATE = 0x1023, 18
"""Of arch_prctl on x86-64 Linux: the request, and the number of the tile registers' state."""
_ARCH_PRCTL = 158


@cache
def tiles_permitted() -> bool:
    """Asks the kernel to let this process use AMX's tile registers: without that, the first use of one ends it.

    To be called in every process that may run cached code which uses them, so it belongs into the cache's key.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _PERMIT_STATE, _TILE_STATE)) == 0


@cache
def multiplies_tiles() -> bool:
    """Whether this process multiplies by AMX."""
    from llvmlite import binding

    return choose_tiles(binding.get_host_cpu_features(), os.environ.get(DOT_VARIABLE), is_permitted=tiles_permitted())


@cache
def dot_path() -> DotPath:
    """This process's path."""
    from llvmlite import binding  # here, so that the name of the variable costs nothing

    return choose_dot_path(binding.get_host_cpu_features(), os.environ.get(DOT_VARIABLE))
