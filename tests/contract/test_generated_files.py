"""Generated files hold what their sources say; `make generate` writes them."""

from __future__ import annotations

from kvpilot_tools.chart import crd_copies, values_table
from kvpilot_tools.generate import expected
from kvpilot_tools.repository import CHART


def test_generated_files_are_current() -> None:
    stale = [str(path) for path, text in expected().items() if not path.exists() or path.read_text() != text]
    assert not stale, f"run `make generate`: {stale}"


def test_the_chart_holds_every_crd_byte_for_byte() -> None:
    copies = crd_copies()
    assert copies
    for source, copy in copies.items():
        assert source.read_bytes() == copy.read_bytes()
    assert {p.name for p in (CHART / "files/crds").iterdir()} == {c.name for c in copies.values()}


def test_every_leaf_value_is_described() -> None:
    import yaml

    text = (CHART / "values.yaml").read_text()
    described = {key for key, _, _ in values_table(text)}

    def leaves(value: object, path: str) -> list[str]:
        if path in described or not isinstance(value, dict) or not value:
            return [path]
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}".lstrip("."))]

    missing = [leaf for leaf in leaves(yaml.safe_load(text), "") if leaf not in described]
    assert not missing
