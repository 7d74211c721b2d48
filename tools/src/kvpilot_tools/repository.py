"""Where things are in a checkout: tools work on the tree that they are installed from (editable)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "kvpilot"
EXAMPLE = ROOT / "examples" / "llmdeployment.yaml"
BUILD = ROOT / "build"
