"""What failed starts leave behind for the next one, in a folder that survives a container restart.

The kubelet restarts a failed container at once with the same settings, before anyone can act. So a start after a device
OOM at load takes the share that the failed one suggested, and after a few failures at the same tuning revision the
process is held: it stays up, unready, until the revision changes. A successful start forgets all.
A ledger that can't be read counts as empty and one that can't be written is logged: neither may stop a start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from kvpilot_engine.errors import ExitCode, OOMCause

_LOG = logging.getLogger(__name__)
LEDGER_FILE = "start-ledger.json"
MAX_FAILURES = 3
"""Failed starts at one revision before the process is held."""
KEPT_FAILURES = 16
COUNTED_CODES = (ExitCode.DEVICE_OOM_AT_LOAD, ExitCode.DOES_NOT_FIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """One failed start, as `start_failures` of /engine/state shows it."""

    time: str
    reason: str
    exit_code: int
    utilization: float
    revision: int
    message: str
    suggested_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class StartAt:
    """Start with this share. `override_reason` says why it is not the wanted one; empty when it is."""

    utilization: float
    override_reason: str = ""


@dataclass(frozen=True, slots=True)
class HoldStart:
    """Don't start: too many failures at this revision."""

    reason: str


def decide_start(failures: tuple[StartFailure, ...], wanted: float, revision: int) -> StartAt | HoldStart:
    """Pure: what to do next, from the failures at this revision."""
    relevant = [failure for failure in failures if failure.revision == revision]
    if len(relevant) >= MAX_FAILURES:
        return HoldStart(f"{len(relevant)} failed starts at tuning revision {revision}; last: {relevant[-1].message}")
    if relevant and relevant[-1].exit_code == ExitCode.DEVICE_OOM_AT_LOAD:
        last = relevant[-1]
        if last.suggested_utilization is not None and last.suggested_utilization < wanted:
            return StartAt(
                last.suggested_utilization,
                f"device OOM at load at {last.utilization:g}; started at the suggested {last.suggested_utilization:g}",
            )
    return StartAt(wanted)


class StartLedger:
    """The file. With no folder it is always empty."""

    def __init__(self, state_dir: Path | None) -> None:
        self._path = None if state_dir is None else state_dir / LEDGER_FILE
        self.failures = self._read()

    def record(self, exit_code: int, termination: Mapping[str, object], *, revision: int) -> None:
        """Note a failed start before the process ends, if it says something about the share of the device."""
        if exit_code not in COUNTED_CODES or termination.get("cause") == OOMCause.HOST:
            return
        suggested = termination.get("suggested")
        advice = suggested.get("utilization") if isinstance(suggested, Mapping) else None
        utilization = termination.get("utilization")
        failure = StartFailure(
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            reason=str(termination.get("reason", "")),
            exit_code=int(exit_code),
            utilization=float(utilization) if isinstance(utilization, int | float) else 0.0,
            revision=revision,
            message=str(termination.get("message", "")),
            suggested_utilization=float(advice) if isinstance(advice, int | float) else None,
        )
        self.failures = (*self.failures, failure)[-KEPT_FAILURES:]
        self._write()

    def clear(self) -> None:
        """A start succeeded."""
        self.failures = ()
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                _LOG.warning("start ledger %s not cleared: %s", self._path, error)

    def _read(self) -> tuple[StartFailure, ...]:
        if self._path is None:
            return ()
        try:
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            names = {f.name for f in fields(StartFailure)}
            return tuple(
                StartFailure(**{key: value for key, value in entry.items() if key in names})
                for entry in raw["failures"]
            )
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("start ledger %s is unreadable, taken as empty: %s", self._path, error)
            return ()

    def _write(self) -> None:
        if self._path is None:
            return
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            body = {"schema": 1, "failures": [asdict(failure) for failure in self.failures]}
            temporary.write_text(json.dumps(body), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            _LOG.warning("start ledger %s not written: %s", self._path, error)
