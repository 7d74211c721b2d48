"""The folder of compiled kernels: fresh after any change, found again without one, and never somebody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kvpilot_engine
from kvpilot_engine.kernels import compile_cache

PACKAGE = Path(kvpilot_engine.__file__).parent

SCRIPT = """
import os, sys
from kvpilot_engine.kernels.compile_cache import prepare_compile_cache
folder = prepare_compile_cache(os.environ)
import numpy as np
from kvpilot_engine.kernels import packed_matrix, packed_rows
raw = packed_matrix.RawMatrix("F16", 1, 2, np.array([[1.5, -2.0]], np.float16).view(np.uint8))
out = np.zeros((1, 2), np.float32)
packed_rows.read_rows(packed_matrix.pack_matrices([raw]), np.zeros(1, np.int64), out)
stats = packed_rows._read_plain_rows.stats
print(folder, out[0, 0], out[0, 1], sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), sep="|")
"""


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a copy of what the kernels need, to be edited."""
    root = tmp_path / "copy"
    target = root / "kvpilot_engine"
    shutil.copytree(PACKAGE / "kernels", target / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, target / name)
    return root


def _run(package: Path, cache: Path, **variables: str) -> tuple[str, float, float, int, int]:
    environ = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    environ |= {"PYTHONPATH": str(package), "KVPILOT_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    # not what the local cluster's set-up has compiled for this environment
    environ |= {"KVPILOT_PREBUILT_DIR": str(cache / "none"), **variables}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)
    folder, first, second, hits, misses = done.stdout.strip().split("|")
    return folder, float(first), float(second), int(hits), int(misses)


def test_a_second_start_loads_and_an_edited_intrinsic_compiles_again(copied_package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder, *values, hits, misses = _run(copied_package, cache)
    assert (values, hits, misses) == ([1.5, -2.0], 0, 1)
    again, *values, hits, misses = _run(copied_package, cache)
    assert (again, values, hits, misses) == (folder, [1.5, -2.0], 1, 0)

    # numba alone would load the old kernel: it stands in packed_rows.py, the intrinsic in float_bits.py.
    source = copied_package / "kvpilot_engine/kernels/float_bits.py"
    text = source.read_text()
    edited = "return builder.fpext(builder.bitcast(arguments[0], F16), F32)"
    negated = "return builder.fneg(builder.fpext(builder.bitcast(arguments[0], F16), F32))"
    assert text.count(edited) == 1
    source.write_text(text.replace(edited, negated))
    other, *values, hits, misses = _run(copied_package, cache)
    assert other != folder
    assert (values, hits, misses) == ([-1.5, 2.0], 0, 1)


def test_what_came_with_the_installation_is_used_under_another_path_too(copied_package: Path, tmp_path: Path) -> None:
    """As in a pod: compiled on a machine with the same level of processor, read only, the sources mounted elsewhere."""
    built, moved = tmp_path / "built", tmp_path / "moved"
    _run(copied_package, built)
    shutil.copytree(copied_package, moved)
    folder, *values, hits, misses = _run(moved, tmp_path / "cache", KVPILOT_PREBUILT_DIR=str(built))
    assert Path(folder).is_relative_to(tmp_path / "cache")
    assert (values, hits, misses) == ([1.5, -2.0], 1, 0)


def _key(folder: Path, environ: dict[str, str] | None = None, processor: str = "x") -> str:
    return compile_cache.compute_cache_key(folder.glob("*.py"), environ or {}, processor)


def test_the_key_changes_with_everything_that_code_depends_on(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.py").write_text("two")
    keys = [_key(tmp_path), _key(tmp_path, processor="y"), _key(tmp_path, {"KVPILOT_CPU_DOT": "plain"})]
    assert _key(tmp_path, {"OTHER": "1"}) == keys[0]
    (tmp_path / "a.py").write_text("onet")
    (tmp_path / "b.py").write_text("wo")
    keys.append(_key(tmp_path))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    keys.append(_key(tmp_path))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({"KVPILOT_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/kvpilot"),
        ({"HOME": "/h"}, "/h/.cache/kvpilot"),
    ],
)
def test_the_folder_lies_where_users_expect_it(environ: dict[str, str], first: str) -> None:
    roots = compile_cache.candidate_roots(environ)
    assert roots[0] == Path(first)
    assert len(roots) == 2


def test_a_home_that_can_not_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, so that no folder can be made below it")
    folder = compile_cache._make_folder([tmp_path / "home", tmp_path / "spare"], "key")
    assert folder == tmp_path / "spare/kernels/key"


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared/kernels/key"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    folder = compile_cache._make_folder([tmp_path / "shared", tmp_path / "own"], "key")
    assert folder == tmp_path / "own/kernels/key"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_no_place_at_all_still_gives_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = compile_cache._make_folder([], "key")
    assert folder.parent == tmp_path
    assert folder.is_dir()


def test_old_folders_go_and_recent_ones_stay(tmp_path: Path) -> None:
    now = tmp_path.stat().st_mtime
    for age_days in range(12):
        folder = tmp_path / f"v{age_days}"
        folder.mkdir()
        used = now - (age_days * 86_400 + 3_600 if age_days > 8 else age_days)
        os.utime(folder, (used, used))
    compile_cache._remove_old_folders(tmp_path / "v0")
    # The oldest are over the number kept; what was used within a day stays although it is over it, too.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(f"v{age}" for age in range(9))


def test_numba_imported_too_early_is_a_mistake_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", sys)
    with pytest.raises(RuntimeError, match="after numba was imported"):
        compile_cache.prepare_compile_cache({})


def test_a_folder_that_the_user_gave_numba_is_used_as_it_is() -> None:
    environ = {"NUMBA_CACHE_DIR": "/somewhere"}
    assert compile_cache.prepare_compile_cache(environ) == Path("/somewhere")
    assert environ == {"NUMBA_CACHE_DIR": "/somewhere"}
