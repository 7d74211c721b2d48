"""The one table from errors to what a client sees: status, type string, code; the code is the metric's label too.

Used for plain answers and for the error object inside a stream. What is not in the table is a bug of ours: 500, without
the exception's text.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from kvpilot_engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelExecutionError,
    ModelNotServedError,
    OverloadedError,
    RequestAbortedError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    status: int
    error_type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def is_unexpected(self) -> bool:
        """A bug of ours: the log wants a trace. Not a fault of the engine, whose message may quote an output."""
        return self.code == _INTERNAL[1]

    @property
    def body(self) -> dict[str, object]:
        return {
            "error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code},
        }


INVALID = "invalid_request_error"
_BY_CLASS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (InvalidRequestError, 400, INVALID, "invalid_value"),
    (ModelNotServedError, 404, INVALID, "model_not_found"),
    (OverloadedError, 429, "rate_limit_error", "queue_full"),
    (UnavailableError, 503, "service_unavailable_error", "unavailable"),
    (DeadlineExceededError, 504, "timeout_error", "deadline_exceeded"),
    (RequestAbortedError, 503, "service_unavailable_error", "aborted"),
    (ModelExecutionError, 500, "server_error", "engine_error"),
)
_BY_STATUS: dict[int, tuple[str, str]] = {
    400: (INVALID, "bad_request"),
    401: ("authentication_error", "invalid_api_key"),
    404: (INVALID, "not_found"),
    405: (INVALID, "method_not_allowed"),
    413: (INVALID, "request_too_large"),
    415: (INVALID, "unsupported_media_type"),
}
_INTERNAL = ("server_error", "internal_error")
UNAVAILABLE_RETRY_S = 5
CODES = (
    *(code for _, _, _, code in _BY_CLASS),
    *(code for _, code in _BY_STATUS.values()),
    "context_length_exceeded",
    _INTERNAL[1],
)
"""Every code that an answer can have."""


def map_error(error: Exception) -> ErrorAnswer:
    """What the client gets for this error."""
    for kind, status, error_type, code in _BY_CLASS:
        if isinstance(error, kind):
            own_code = getattr(error, "code", None)
            retry = getattr(error, "retry_after_s", UNAVAILABLE_RETRY_S if status == 503 else None)
            return ErrorAnswer(status, error_type, own_code or code, str(error), getattr(error, "param", None), retry)
    if isinstance(error, web.HTTPException):
        error_type, code = _BY_STATUS.get(error.status, (INVALID, "bad_request") if error.status < 500 else _INTERNAL)
        return ErrorAnswer(error.status, error_type, code, error.text or error.reason)
    return ErrorAnswer(500, *_INTERNAL, "internal error; the server's log has the details under this request's id")
