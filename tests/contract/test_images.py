"""The images install what the packages say they need: their dependencies are a layer of their own, listed by hand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["engine", "operator"])
def test_every_dependency_of_a_package_is_in_its_image(part: str) -> None:
    project = tomllib.loads((ROOT / part / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[<>=!\[; ]", requirement)[0] for requirement in project["dependencies"]}
    commands = (ROOT / f"Dockerfile.{part}").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    installed = {word for command in commands if "pip install" in command for word in command.split()}
    assert needed <= installed
