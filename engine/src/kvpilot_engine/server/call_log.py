"""One line in the log for each finished call: who asked, how it ended, how much and how long. Never any text of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from aiohttp import web

_LOG = logging.getLogger(__name__)
CLIENT_GONE = 499
"""The status in the log, as proxies write it, of a call whose client hung up."""


@dataclass(slots=True)
class CallLog:
    """Filled while the call runs; what stays None is left out of the line."""

    path: str
    status: int = 0
    call_id: str | None = None
    model: str | None = None
    is_streamed: bool | None = None
    num_choices: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: Sequence[str] | None = None
    error: str | None = None
    """The code of the error that ended it."""
    first_token_s: float | None = None
    total_s: float = 0.0
    arrived_at: float = field(default=0.0, kw_only=True)

    def write(self, now: float) -> None:
        self.total_s = round(now - self.arrived_at, 4)
        fields = {key: value for key, value in asdict(self).items() if value is not None and key != "arrived_at"}
        _LOG.info("request finished", extra={"fields": fields})


_KEY = web.RequestKey("call_log", CallLog)


def start_call_log(request: web.Request, *, arrived_at: float) -> CallLog:
    log = CallLog(request.path, arrived_at=arrived_at)
    request[_KEY] = log
    return log


def call_log_of(request: web.Request) -> CallLog | None:
    """None for what is no generating call."""
    return request.get(_KEY)
