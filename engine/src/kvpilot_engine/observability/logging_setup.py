"""One line per event, as `key=value` for people or JSON for machines, with the request's id where there is one.

What a record has in `extra={"fields": {...}}` becomes fields of the line: numbers and lists stay such in JSON.

Never in a log: prompts, outputs, keys. The only place that touches the root logger; called once per process.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

request_id_var: ContextVar[str] = ContextVar("request_id", default="")
"""Set by the server's middleware for the time of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSettings:
    level: str = "INFO"
    log_format: str = "text"
    """text | json"""


class _Formatter(logging.Formatter):
    def __init__(self, process: str, *, as_json: bool) -> None:
        super().__init__()
        self._process = process
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields: dict[str, object] = {
            "time": moment,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name.removeprefix("kvpilot_engine."),
            "request_id": request_id_var.get(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        present = {key: value for key, value in fields.items() if value != ""}
        if self._as_json:
            return json.dumps(present, ensure_ascii=False)
        trace = present.pop("exception", "")
        line = " ".join(f"{key}={_quote(_as_text(value))}" for key, value in present.items())
        return f"{line}\n{trace}" if trace else line


def _as_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if any(c in value for c in ' "=\n') else value


def configure_logging(settings: LoggingSettings, process: str, stream: TextIO | None = None) -> None:
    """Send everything to standard error, in one form; replaces what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(process, as_json=settings.log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
