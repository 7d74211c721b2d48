"""The HTTP parent stays small: torch and its like are imported by the engine child alone."""

from __future__ import annotations

import subprocess
import sys


def test_parent_never_imports_torch() -> None:
    code = (
        "import sys, kvpilot_engine.cli, kvpilot_engine.__main__; "
        "heavy = ('torch', 'triton', 'numba', 'numpy', 'llguidance', 'transformers'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
