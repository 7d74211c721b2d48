"""A top-level folder called operator/ breaks interpreters and test runs unless these rules hold."""

from __future__ import annotations

import operator
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    ROOT / "engine/src/kvpilot_engine",
    ROOT / "operator/src/kvpilot_operator",
    ROOT / "tools/src/kvpilot_tools",
)


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listing.splitlines()]


def test_the_standard_library_operator_is_not_shadowed() -> None:
    assert Path(operator.__file__ or "").is_relative_to(sysconfig.get_paths()["stdlib"])


def test_project_folders_are_not_packages() -> None:
    for folder in ("engine", "operator", "tools"):
        assert not (ROOT / folder / "__init__.py").exists()
    for folder in ("engine", "operator"):
        assert not list((ROOT / folder).glob("*.py"))
        assert not (ROOT / folder / "tests").exists()


def test_no_python_file_lies_in_the_root() -> None:
    assert not list(ROOT.glob("*.py"))


def test_tests_are_not_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_path_root_holds_a_module_named_like_the_standard_library() -> None:
    roots = [package.parent for package in PACKAGES] + [ROOT / "tests", ROOT / "tools"]
    for root in roots:
        for entry in root.iterdir():
            if entry.suffix == ".py" or (entry.is_dir() and (entry / "__init__.py").exists()):
                assert entry.stem not in sys.stdlib_module_names, entry


def test_root_pyproject_has_no_project() -> None:
    assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_constraints_pin_exactly_and_name_no_host() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert "==" in line, line
        assert "://" not in line, line


def test_no_module_name_says_nothing() -> None:
    vague = {"utils", "helpers", "common", "misc", "types"}
    assert not [path for path in tracked() if path.suffix == ".py" and path.stem in vague]
