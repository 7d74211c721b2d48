"""The level of processor that kernels are compiled for."""

from __future__ import annotations

import pytest

from kvpilot_engine.kernels.compile_target import CompileTarget, choose_target, set_target

V3 = ("sse4.2", "ssse3", "popcnt", "cx16", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@pytest.mark.parametrize(
    ("features", "target"),
    [
        ((*V4, "avx512vnni", "amx-bf16", "amx-tile"), ("x86-64-v4", "+amx-bf16,+amx-tile,+avx512vnni")),
        (V4, ("x86-64-v4", "")),
        ((*V3, "avx512f", "avxvnni"), ("x86-64-v3", "+avxvnni")),
        (V3[:4], ("x86-64-v2", "")),
    ],
)
def test_the_highest_level_that_a_processor_has_whole(features: tuple[str, ...], target: tuple[str, str]) -> None:
    assert choose_target({**dict.fromkeys(V4, False), **dict.fromkeys(features, True)}) == CompileTarget(*target)


def test_other_processors_have_no_level() -> None:
    assert choose_target({"neon": True}) is None


def test_numba_is_told_unless_the_user_has_named_a_target() -> None:
    environ: dict[str, str] = {}
    target = set_target(environ)
    assert target is None or environ == {"NUMBA_CPU_NAME": target.cpu_name, "NUMBA_CPU_FEATURES": target.features}
    named = {"NUMBA_CPU_NAME": "haswell"}
    assert set_target(named) == CompileTarget("haswell", "")
    assert named == {"NUMBA_CPU_NAME": "haswell"}
