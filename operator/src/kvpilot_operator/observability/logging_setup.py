"""How the operator logs: one JSON object or one plain line per record, on standard error.

What is logged is decided where it is logged; objects and secrets never are. A record may carry `key` (the object) and
`event` (a short fixed word) as extras.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_EXTRAS = ("key", "event")
_NOISY = ("aiohttp.access", "asyncio")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record brings along."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: str(getattr(record, name)) for name in _EXTRAS if hasattr(record, name)})
        reference = getattr(record, "k8s_ref", None)
        if isinstance(reference, dict) and "key" not in line:
            line["key"] = f"{reference.get('namespace')}/{reference.get('name')}"
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class PlainFormatter(logging.Formatter):
    """For a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return f"{line} [{record.key}]" if hasattr(record, "key") else line


def set_up_logging(*, log_format: str, level: str) -> None:
    """Replace the root logger's handlers. Called once, by the composition root."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # kopf tells at INFO that each of our event handlers succeeded: one line for every pod change.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
