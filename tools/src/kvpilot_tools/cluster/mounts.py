"""File systems mounted below a folder: finding and releasing them.

Invariant: a folder is deleted only when nothing is mounted below it, since deleting through a mount would delete what
is mounted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from kvpilot_tools.cluster.errors import CleanupError

_ESCAPE = re.compile(r"\\([0-7]{3})")
_MOUNTINFO = Path("/proc/self/mountinfo")


def mounts_below(folder: Path, mountinfo: str) -> list[Path]:
    """Return the mount points at or below a folder, the latest first."""
    points = (Path(_unescape(line.split()[4])) for line in mountinfo.splitlines() if line)
    return [point for point in points if point == folder or folder in point.parents][::-1]


def release(folder: Path) -> None:
    """Unmount all below a folder; what is busy is detached. Raises CleanupError when something stays."""
    for options in ((), ("-l",)):
        left = mounts_below(folder, _MOUNTINFO.read_text())
        if left:
            subprocess.run(["umount", *options, *map(str, left)], capture_output=True, check=False)
    left = mounts_below(folder, _MOUNTINFO.read_text())
    if left:
        raise CleanupError(f"{len(left)} file systems can't be unmounted, among them {left[0]}")


def remove_tree(folder: Path) -> None:
    """Delete a folder; refuses while something is mounted below it."""
    left = mounts_below(folder, _MOUNTINFO.read_text())
    if left:
        raise CleanupError(f"{folder} is not deleted: {left[0]} is mounted below it")
    if folder.exists():
        shutil.rmtree(folder)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)
