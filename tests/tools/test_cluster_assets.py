"""Finding binaries: which place wins, which version fits, what is said when nothing can be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot_tools.cluster.assets import (
    ALL_ASSETS,
    API_SERVER,
    ETCD,
    HELM,
    KUBECTL,
    PAUSE,
    Asset,
    AssetStore,
    recipe_hash,
)
from kvpilot_tools.cluster.errors import BuildError, RequirementError
from kvpilot_tools.cluster.progress import Progress


def program(folder: Path, name: str, prints: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{prints}'\n")
    file.chmod(0o755)
    return file


def store(tmp_path: Path, *, path: str = "", override: Path | None = None) -> AssetStore:
    return AssetStore(cache=tmp_path / "cache", override=override, search_path=path)


def fake_go(folder: Path, *, body: str) -> str:
    """A `go` that only has to do what the build asks of it; the arguments end in `-o TARGET PACKAGE`."""
    folder.mkdir(parents=True)
    (folder / "go").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "go").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def cached(tmp_path: Path, asset: Asset) -> Path:
    return tmp_path / "cache" / "bin" / asset.folder / asset.name


BUILD = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


@pytest.mark.parametrize(
    ("asset", "printed", "fits"),
    [
        (API_SERVER, "Kubernetes v1.34.9", True),
        (API_SERVER, "Kubernetes v1.35.0", False),
        (API_SERVER, "Kubernetes v1.3.4", False),
        (KUBECTL, "Client Version: v1.34.4\nKustomize Version: v5.7.1", True),
        (ETCD, "etcd Version: 3.6.2", True),
        (HELM, "v3.22", True),
        (HELM, "", False),
    ],
)
def test_a_version_fits_when_it_is_of_our_minor_line(asset: Asset, printed: str, fits: bool) -> None:
    assert asset.fits(printed) is fits


def test_a_program_on_path_is_used_when_its_version_fits(tmp_path: Path) -> None:
    found = program(tmp_path / "bin", "etcd", "etcd Version: 3.6.1")
    assert store(tmp_path, path=str(tmp_path / "bin")).find(ETCD) == found


def test_a_program_on_path_of_another_version_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "bin", "etcd", "etcd Version: 3.4.0")
    assert store(tmp_path, path=str(tmp_path / "bin")).find(ETCD) is None


def test_the_named_folder_wins_over_path(tmp_path: Path) -> None:
    program(tmp_path / "bin", "etcd", "etcd Version: 3.6.1")
    named = program(tmp_path / "named", "etcd", "etcd Version: 3.6.2")
    assert store(tmp_path, path=str(tmp_path / "bin"), override=tmp_path / "named").find(ETCD) == named


def test_a_named_folder_with_another_version_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "named", "etcd", "etcd Version: 3.4.0")
    with pytest.raises(RequirementError, match=r"KVPILOT_ASSETS: .*etcd Version: 3\.4\.0.*etcd 3\.6"):
        store(tmp_path, override=tmp_path / "named").find(ETCD)


def test_without_go_the_error_names_the_binaries_and_both_ways_out(tmp_path: Path) -> None:
    with pytest.raises(RequirementError, match=r"missing: etcd, helm.*Install Go.*KVPILOT_ASSETS"):
        store(tmp_path).ensure([ETCD, HELM], Progress())


def test_a_missing_binary_is_built_once_and_then_found(tmp_path: Path) -> None:
    lines: list[str] = []
    builder = store(tmp_path, path=fake_go(tmp_path / "go", body=BUILD))
    found = builder.ensure([PAUSE], Progress(write=lines.append))
    assert found == {"pause": cached(tmp_path, PAUSE)}
    assert found["pause"].read_text() == "built\n"
    assert any("building pause" in line and "1 of 1" in line for line in lines)

    lines.clear()
    assert builder.ensure([PAUSE], Progress(write=lines.append)) == found
    assert lines == []


def test_a_binary_built_from_other_sources_is_built_again(tmp_path: Path) -> None:
    builder = store(tmp_path, path=fake_go(tmp_path / "go", body=BUILD))
    builder.ensure([PAUSE], Progress())
    stamp = cached(tmp_path, PAUSE).with_name("pause.stamp")
    stamp.write_text(stamp.read_text().replace(recipe_hash(PAUSE), "of-an-older-recipe"))
    assert builder.find(PAUSE) is None


def test_a_failed_build_names_its_log_and_leaves_nothing_to_be_found(tmp_path: Path) -> None:
    builder = store(tmp_path, path=fake_go(tmp_path / "go", body="echo no such module; exit 1"))
    with pytest.raises(BuildError, match=r"(?s)pause\.build\.log.*no such module"):
        builder.ensure([PAUSE], Progress())
    assert builder.find(PAUSE) is None


def test_every_recipe_is_pinned_and_of_its_own_place() -> None:
    assert len({(asset.folder, asset.name) for asset in ALL_ASSETS}) == len(ALL_ASSETS)
    assert len({recipe_hash(asset) for asset in ALL_ASSETS}) == len(ALL_ASSETS)
