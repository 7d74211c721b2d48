"""Where compiled kernels are kept between starts. Imports nothing heavy: it must run before numba is imported.

numba looks a kernel up by the file it stands in, and so would go on using one whose *other* files have changed. The
folder is therefore named by everything that compiled code depends on: all sources of this folder, the versions of
numba, llvmlite and Python, the level of processor (compile_target.py), and the forced dot product. It lies, in this
order, below

    NUMBA_CACHE_DIR       used as it is, when somebody set it
    KVPILOT_CACHE_DIR, XDG_CACHE_HOME/kvpilot or ~/.cache/kvpilot
    a private folder of this user in the system's temporary one, where none of these can be written

What is loaded from there runs, so a folder that others could have written is not used. A new folder starts with what
came with the installation (prebuilt.py), when that was made by the same sources for the same level.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, MutableMapping
from importlib.metadata import version
from pathlib import Path

from kvpilot_engine.kernels.compile_target import set_target
from kvpilot_engine.kernels.cpu_features import DOT_VARIABLE, tiles_permitted

NUMBA_VARIABLE = "NUMBA_CACHE_DIR"
CACHE_VARIABLE = "KVPILOT_CACHE_DIR"
PREBUILT_VARIABLE = "KVPILOT_PREBUILT_DIR"
DEFAULT_PREBUILT = Path(sys.prefix) / "share" / "kvpilot"
"""Where an installation may bring compiled kernels along; read only."""

FOLDERS_KEPT = 6
"""Of the most recent versions, about 5 MB each."""
_IN_USE_S = 24 * 3600.0
"""A folder used since is never removed: an engine may be running on it."""


def prepare_compile_cache(environ: MutableMapping[str, str]) -> Path:
    """Makes the folder, tells numba through `environ` (the process's own), removes old ones, and returns it."""
    if environ.get(NUMBA_VARIABLE):
        return Path(environ[NUMBA_VARIABLE])
    if "numba" in sys.modules:
        raise RuntimeError("the compile cache is set up after numba was imported: numba has chosen its folder already")
    target = set_target(environ)
    processor = _describe_processor() if target is None else str(target)
    key = compute_cache_key(Path(__file__).parent.glob("*.py"), environ, f"{processor}\ntiles: {tiles_permitted()}")
    folder = _make_folder(candidate_roots(environ), key)
    _copy_prebuilt(Path(environ.get(PREBUILT_VARIABLE) or DEFAULT_PREBUILT) / "kernels" / key, folder)
    environ[NUMBA_VARIABLE] = str(folder)
    _remove_old_folders(folder)
    return folder


def compute_cache_key(sources: Iterable[Path], environ: Mapping[str, str], processor: str) -> str:
    """A name that changes with whatever compiled code depends on."""
    digest = hashlib.sha256()
    for source in sorted(sources, key=lambda path: path.name):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)}\n".encode())
        digest.update(content)
    digest.update(f"{sys.implementation.cache_tag} {version('numba')} {version('llvmlite')}\n".encode())
    digest.update(f"{processor}\n{environ.get(DOT_VARIABLE, '')}\n".encode())
    return digest.hexdigest()[:20]


def candidate_roots(environ: Mapping[str, str]) -> list[Path]:
    """Where the folders may lie, best first."""
    if environ.get(CACHE_VARIABLE):
        chosen = [Path(environ[CACHE_VARIABLE])]
    elif environ.get("XDG_CACHE_HOME"):
        chosen = [Path(environ["XDG_CACHE_HOME"]) / "kvpilot"]
    elif environ.get("HOME"):
        chosen = [Path(environ["HOME"]) / ".cache" / "kvpilot"]
    else:
        chosen = []
    return [*chosen, Path(tempfile.gettempdir()) / f"kvpilot-{os.getuid()}"]


def _describe_processor() -> str:
    """Its name and what it can do; two machines of one name may differ by their hypervisor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    first_of_each = {line.split(":")[0].strip(): line for line in reversed(lines) if line.startswith(wanted)}
    return "\n".join([platform.machine(), *(first_of_each[name] for name in sorted(first_of_each))])


def _make_folder(roots: Iterable[Path], key: str) -> Path:
    for root in roots:
        folder = root / "kernels" / key
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (_is_ours_alone(folder.parent) and _is_ours_alone(folder)):
                continue
            os.utime(folder)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="kvpilot-kernels-"))


def _copy_prebuilt(source: Path, folder: Path) -> None:
    """Fills an empty folder with what was compiled elsewhere, perhaps under another path.

    numba writes its files by renaming, and so does this: another start may be reading.
    """
    target = folder / _name_of_place(Path(__file__).parent)
    try:
        if not source.is_dir() or any(folder.iterdir()):
            return
        target.mkdir(mode=0o700)
        for file in source.glob("*/*.nb?"):
            unfinished = target / f"{file.name}.{os.getpid()}"
            shutil.copyfile(file, unfinished)
            unfinished.replace(target / file.name)
    except OSError:
        return  # they are compiled instead


def _name_of_place(sources: Path) -> str:
    """What numba calls the part of its folder for the sources of one folder."""
    return f"{sources.name}_{hashlib.sha1(str(sources).encode(), usedforsecurity=False).hexdigest()}"


def _is_ours_alone(folder: Path) -> bool:
    """Nobody else can put files there. A volume's group is this process's own, and may write."""
    status = folder.stat()
    by_group = status.st_mode & stat.S_IWGRP and status.st_gid != os.getgid()
    return status.st_uid == os.getuid() and not by_group and not status.st_mode & stat.S_IWOTH


def _remove_old_folders(current: Path) -> None:
    """Keeps the current one and the most recent others. Failing to tidy up is no reason not to start."""
    now = time.time()  # noqa: TID251 - compared with file times
    try:
        by_age = sorted((entry.stat().st_mtime, entry) for entry in current.parent.iterdir() if entry != current)
    except OSError:
        return
    for used_at, folder in by_age[: -(FOLDERS_KEPT - 1)]:
        if now - used_at > _IN_USE_S:
            shutil.rmtree(folder, ignore_errors=True)
