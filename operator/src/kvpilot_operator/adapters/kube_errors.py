"""One answer of the API server that is not a success, as one of our errors. The only table of this kind."""

from __future__ import annotations

import json

from kvpilot_operator.errors import (
    ConflictError,
    InvalidSpecError,
    NamespaceGoingError,
    OperatorError,
    RefusedError,
    TransientError,
)

_BAD_OVERLAY = ("failed to create typed patch object", "failed to convert new object", "failed to create manager")
_NAMESPACE_GOING = "NamespaceTerminating"
_MAX_MESSAGE = 500


def build_error(status: int, body: bytes, what: str, retry_after: str | None = None) -> OperatorError:
    """The error for HTTP `status`; `what` names the request. Only a Status message is quoted, never another body."""
    message, details_retry_s = _parse_status(body)
    text = f"{what}: HTTP {status}{': ' + message if message else ''}"
    retry_s = _parse_seconds(retry_after) if retry_after else details_retry_s
    match status:
        case 400 | 413 | 422:
            return InvalidSpecError(text)
        case 403 if _NAMESPACE_GOING in _parse_causes(body):
            return NamespaceGoingError(text)
        case 403 | 405 | 415:
            return RefusedError(text, retry_after_s=retry_s)
        case 404 | 409:
            # A write to something that went away is a lost race like any other: observe again.
            return ConflictError(text, retry_after_s=retry_s)
        case 500 if message.startswith(_BAD_OVERLAY):
            # Server-side apply answers 500 for a pod template that is no pod template: the user's overlay.
            return InvalidSpecError(text)
        case _:
            return TransientError(text, retry_after_s=retry_s)


def _parse_status(body: bytes) -> tuple[str, float | None]:
    try:
        raw = json.loads(body)
    except ValueError:
        return "", None
    if not isinstance(raw, dict) or raw.get("kind") != "Status":
        return "", None
    details = raw.get("details")
    seconds = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return str(raw.get("message") or "")[:_MAX_MESSAGE], float(seconds) if isinstance(seconds, int) else None


def _parse_causes(body: bytes) -> list[str]:
    try:
        causes = json.loads(body)["details"]["causes"]
        return [str(cause.get("reason")) for cause in causes]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _parse_seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
