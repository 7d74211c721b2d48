"""Write the files that are generated from others. `expected()` says what each must hold; lint compares."""

from __future__ import annotations

from pathlib import Path

from kvpilot_tools.chart import crd_copies, readme
from kvpilot_tools.crd_reference import REFERENCE, crd_markdown
from kvpilot_tools.repository import CHART, ROOT


def expected() -> dict[Path, str]:
    """Path → text of every generated file."""
    from kvpilot_engine.flags import build_reference  # only needed here, and pulls in the engine

    files = {copy: source.read_text() for source, copy in crd_copies().items()}
    files[CHART / "README.md"] = readme()
    files[REFERENCE] = crd_markdown()
    files[ROOT / "docs" / "reference" / "flags.md"] = build_reference()
    return files


def main() -> None:
    for path, text in expected().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
