"""How the threads of the CPU path wait for each other, as the OpenMP library itself tells it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot_engine.execution.cpu_threads import SPIN_COUNT, prefer_openmp

LOAD = """
import sys
from pathlib import Path
from kvpilot_engine.cli import ExecutionModelLoader
from kvpilot_engine.core.settings import CacheSettings, SchedulerSettings
from kvpilot_engine.errors import ModelNotFoundError
from kvpilot_engine.execution.settings import ExecutionSettings

loader = ExecutionModelLoader(
    model=sys.argv[1],
    revision=None,
    execution=ExecutionSettings(model=Path(sys.argv[1])),
    cache=CacheSettings(),
    scheduler=SchedulerSettings(),
)
try:
    loader.load(0.9)
except ModelNotFoundError:
    pass
"""

RUN_KERNEL = """
import numpy as np
from kvpilot_engine.kernels.activation_quantization import QuantizedRows, quantize_rows
rows, quantized = np.ones((8, 32), np.float32), QuantizedRows.allocate(8, 32)
quantize_rows(rows, quantized.values, quantized.groups)
"""


@pytest.mark.parametrize("open_threads", [RUN_KERNEL, "import torch"], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "77"}, 77), ({"OMP_WAIT_POLICY": "PASSIVE"}, 0)],
    ids=["ours", "the user's count", "the user's policy"],
)
def test_loading_lets_threads_spin_a_little_only_and_the_user_wins(
    tmp_path: Path, open_threads: str, given: dict[str, str], spin_count: int
) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    answer = subprocess.run(
        [sys.executable, "-c", LOAD + open_threads, str(tmp_path / "none.gguf")],
        env={**kept, **given, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", answer.stderr) == [str(spin_count)]


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        ({}, {"NUMBA_THREADING_LAYER_PRIORITY": "omp tbb workqueue"}),
        ({"NUMBA_THREADING_LAYER": "workqueue"}, {}),
        ({"NUMBA_THREADING_LAYER_PRIORITY": "tbb omp"}, {}),
    ],
)
def test_openmp_is_preferred_unless_the_user_has_chosen(environ: dict[str, str], added: dict[str, str]) -> None:
    expected = environ | added
    prefer_openmp(environ)
    assert environ == expected
