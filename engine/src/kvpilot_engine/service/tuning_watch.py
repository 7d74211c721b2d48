"""Follows the tuning file by its content and decides what a new value means for the running engine.

A ConfigMap volume swaps a symlink, so inode and time say little: the text itself is compared. Reading is cheap (a few
hundred bytes four times a second) and needs no inotify in the container.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpilot_engine.core.tuning import TuningError, parse_tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRequest:
    """What the file asks of this process. `utilization` is None when it says nothing for it."""

    revision: int
    utilization: float | None
    problem: str = ""
    """Why the file can't be followed; `revision` is then the newest known one."""


class TuningFile:
    """Reads one path. `poll` answers None as long as the content is the one seen last."""

    def __init__(self, path: Path | None, *, pod_uid: str, device: str) -> None:
        self._path = path
        self._pod_uid = pod_uid
        self._device = device
        self._text: str | None = None
        self._revision = 0

    def poll(self) -> TuningRequest | None:
        if self._path is None:
            return None
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None  # not mounted yet, or in the middle of a swap: the value in force stays
        except (OSError, UnicodeDecodeError) as error:
            text = f"\0{error}"
        if text == self._text:
            return None
        self._text = text
        if text.startswith("\0"):
            return TuningRequest(revision=self._revision, utilization=None, problem=f"unreadable: {text[1:]}")
        try:
            tuning = parse_tuning(text)
        except TuningError as error:
            return TuningRequest(revision=self._revision, utilization=None, problem=str(error))
        self._revision = tuning.revision
        return TuningRequest(revision=tuning.revision, utilization=tuning.value_for(self._pod_uid, self._device))
