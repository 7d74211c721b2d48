"""The engine's errors. One class for each question that a caller asks: may I retry, whose fault is it, which status?

    EngineError
    ├── InvalidRequestError          the client's fault: 400, names the parameter
    │   └── NeverFitsError           longer than the cache or the model can ever hold
    ├── ModelNotServedError          404: another model's name
    ├── OverloadedError              429: the queue is full; retry later
    ├── UnavailableError             503: loading, draining or failed
    ├── DeadlineExceededError        504: the request's own deadline passed, or the engine fell silent
    ├── RequestAbortedError          the client went away, or the engine stopped before the request ended
    ├── ModelExecutionError          a step failed for a reason that is not memory
    │   ├── GrammarTooComplexError   one request's own grammar: 400, its sequence ends and the others go on
    │   └── DeviceOutOfMemoryError   a device allocation failed; carries phase, cause and bytes
    └── StartupError                 the process can't serve: carries the exit code and the termination message
        ├── SettingsError            64: lists every bad setting
        ├── ModelNotFoundError       66
        ├── DoesNotFitError          72: required, available and suggested values
        └── DeviceContendedError     73: others hold the memory that our share needs

`server/error_mapping.py` alone maps them to HTTP; `cli.py` alone maps StartupError to an exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """Process exit codes: the contract with the operator (docs/contracts/engine-http.md)."""

    DRAINED = 0
    SETTINGS = 64
    MODEL_NOT_FOUND = 66
    INTERNAL = 70
    DEVICE_OOM_AT_LOAD = 71
    DOES_NOT_FIT = 72
    DEVICE_CONTENDED = 73
    DEVICE_OOM_SERVING = 74
    DEVICE_FAULT = 75


class OOMPhase(StrEnum):
    """What the engine was doing when an allocation failed."""

    LOAD = "load"
    WARMUP = "warmup"
    PREFILL = "prefill"
    DECODE = "decode"
    SAMPLE = "sample"


class OOMCause(StrEnum):
    """Whose memory was missing: our own cap, a neighbour's use of the device, or the host."""

    OWN = "own"
    NEIGHBOUR = "neighbour"
    HOST = "host"


class EngineError(Exception):
    """Root of the tree."""


class InvalidRequestError(EngineError):
    """A request that can't be served as written; `param` names the field of the request body."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NeverFitsError(InvalidRequestError):
    """A request longer than the model's limit or than the whole KV cache; the message holds both numbers."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotServedError(EngineError):
    """The request names a model that this server does not serve."""


class OverloadedError(EngineError):
    """The waiting queue is full."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(EngineError):
    """The server can't take requests now: loading, draining or failed."""


class DeadlineExceededError(EngineError):
    """The request did not end in its time; what it held is freed."""


class RequestAbortedError(EngineError):
    """The request ended before its last token, by its client or by the engine's end."""


class ModelExecutionError(EngineError):
    """A step failed for a reason other than memory."""


class GrammarTooComplexError(ModelExecutionError):
    """A request's own grammar became too complex to follow: the client's fault, seen only on the way."""


class DeviceOutOfMemoryError(ModelExecutionError):
    """A device allocation failed. Sizes in bytes; None where the allocator did not say."""

    def __init__(
        self,
        message: str,
        *,
        phase: OOMPhase,
        cause: OOMCause,
        requested_bytes: int | None = None,
        limit_bytes: int | None = None,
        free_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.cause = cause
        self.requested_bytes = requested_bytes
        self.limit_bytes = limit_bytes
        self.free_bytes = free_bytes


class StartupError(EngineError):
    """The process can't serve. `reason` is the CamelCase word of the termination message."""

    exit_code: ExitCode = ExitCode.INTERNAL
    reason: str = "StartupFailed"


class SettingsError(StartupError):
    """Bad settings, all of them at once."""

    exit_code = ExitCode.SETTINGS
    reason = "InvalidSettings"

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class ModelNotFoundError(StartupError):
    """The model is not there, or there is no access to it."""

    exit_code = ExitCode.MODEL_NOT_FOUND
    reason = "ModelNotFound"


class DoesNotFitError(StartupError):
    """The share of the device can't hold weights, activations and a cache for one request of full length.

    `suggested` holds what would do: `utilization` (smallest share, 0..1, absent when the whole device is too small)
    and `max_model_len` (longest length that fits now, in tokens, absent when none).
    """

    exit_code = ExitCode.DOES_NOT_FIT
    reason = "ModelDoesNotFit"

    def __init__(
        self, message: str, *, required_bytes: int, available_bytes: int, suggested: Mapping[str, float | int]
    ) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes
        self.suggested = dict(suggested)


class DeviceContendedError(StartupError):
    """Others hold so much of the device that a start whose share would do finds too little free."""

    exit_code = ExitCode.DEVICE_CONTENDED
    reason = "DeviceMemoryContended"

    def __init__(self, message: str, *, required_bytes: int, free_bytes: int, total_bytes: int) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes
