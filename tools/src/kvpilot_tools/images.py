"""Our images, built from this checkout under tags that name their content, so that nothing is built or loaded twice."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.repository import ROOT


@dataclass(frozen=True, slots=True)
class Image:
    """One Dockerfile and what it is built from."""

    name: str
    dockerfile: str
    sources: tuple[str, ...]

    @property
    def tag(self) -> str:
        """First twelve digits of a hash over every source file's path and content."""
        digest = hashlib.sha256()
        for path in self._files():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:12]

    @property
    def repository(self) -> str:
        return f"localhost/{self.name}"

    @property
    def reference(self) -> str:
        return f"{self.repository}:{self.tag}"

    def _files(self) -> list[Path]:
        found: list[Path] = []
        for source in (self.dockerfile, *self.sources):
            path = ROOT / source
            found += [path] if path.is_file() else sorted(p for p in path.rglob("*.py"))
        return found


OPERATOR = Image(
    "kvpilot-operator", "Dockerfile.operator", ("constraints.txt", "operator/pyproject.toml", "operator/src")
)
ENGINE = Image("kvpilot-engine", "Dockerfile.engine", ("constraints.txt", "engine/pyproject.toml", "engine/src"))


def build(image: Image, *, load: bool) -> str:
    """Build unless it is there already, load it into the local cluster if told to, and return its reference."""
    reference = image.reference  # once: sources may be edited while it is built
    command = [sys.executable, "-m", "kvpilot_tools.cluster", "build-image", str(ROOT / image.dockerfile)]
    command += ["--tag", reference, "--if-missing", *(["--load"] if load else [])]
    subprocess.run(command, check=True, cwd=ROOT)
    return reference


def main() -> None:
    references = [build(image, load=False) for image in (OPERATOR, ENGINE)]
    print(f"make images: built {' and '.join(references)}")


if __name__ == "__main__":
    main()
