"""The operator's error tree: one class for each question that a caller asks.

    OperatorError
    ├── SettingsError        the operator was started wrongly; lists every problem
    ├── InvalidSpecError     the user's fault; permanent until the object (or what it names) changes
    ├── RefusedError         the API server said no (rights, quota, admission); retried slowly, shown in status
    │   └── NamespaceGoingError   the namespace is being deleted, and everything in it
    ├── TransientError       try again, after `retry_after_s` when it is known
    │   └── ConflictError    somebody else wrote first, or holds a field or a name; observe again
    └── ObservationError     an answer could not be understood

Not for expected outcomes: an object that is not there is `None`, a replica that can't be read is `Unknown(reason)`.
Library exceptions never leave an adapter; `raise ... from` keeps the cause.
"""

from __future__ import annotations

from collections.abc import Iterable


class OperatorError(Exception):
    """Everything that the operator raises itself."""

    kind = "Error"
    """Label of the error metric: bounded, so never a message."""


class SettingsError(OperatorError):
    """Bad settings: all problems at once, each with the name of its variable."""

    kind = "Settings"

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class InvalidSpecError(OperatorError):
    """The object asks for something impossible. Retrying does not help, changing the object does."""

    kind = "InvalidSpec"


class RefusedError(OperatorError):
    """The API server understood and refused: missing rights, a quota, an admission plugin."""

    kind = "Refused"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NamespaceGoingError(RefusedError):
    """Nothing can be made in a namespace that is being deleted; what is in it goes by itself."""

    kind = "NamespaceGoing"


class TransientError(OperatorError):
    """Not now: time-out, connection, overload, a server error. Retry, with a growing delay."""

    kind = "Transient"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConflictError(TransientError):
    """HTTP 409: another writer was first, or owns the field or the name. Observe again, then decide again."""

    kind = "Conflict"


class ObservationError(OperatorError):
    """An answer that can't be what it claims to be (no JSON, no object, wrong kind)."""

    kind = "Observation"
