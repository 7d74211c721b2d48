"""The operator's settings: one frozen object, built once from the environment, every problem reported at once.

Variable names are derived from the field names (`tick_seconds` ← `KVPILOT_OPERATOR_TICK_SECONDS`), so that no message
can name the wrong one. Knows nothing of kopf or the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpilot_operator.errors import SettingsError

PREFIX = "KVPILOT_OPERATOR_"

# Kubernetes injects these for every Service of the namespace, also for one called `kvpilot-operator`.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)$")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    namespaces: tuple[str, ...] = ()
    """Namespaces that are served, separated by commas. Empty: the whole cluster (needs the ClusterRole)."""
    default_engine_image: str = ""
    """Image for objects that name none; pinned in their status when first seen. Empty: such objects are invalid."""
    tick_seconds: float = 5.0
    """How often each object is observed and decided on when nothing happens to it."""
    resync_seconds: float = 600.0
    """How often everything is listed anew: after an expired watch no deletion is ever told."""
    scrape_deadline_seconds: float = 2.0
    """How long one engine may take to answer. Shorter than the tick, or slow engines would make every tick late."""
    scrape_concurrency: int = 64
    """Engines read at the same time, per object and over all objects."""
    request_timeout_seconds: float = 15.0
    """Deadline of one call to the API server."""
    workers: int = 8
    """Objects reconciled at the same time; never two passes for one object."""
    max_backoff_seconds: float = 300.0
    """Longest pause between two tries of an object that keeps failing."""
    lease_name: str = "kvpilot-operator"
    """The Lease that keeps a second operator of the same reach from writing."""
    lease_namespace: str = ""
    """Where that Lease lives. Empty: the first of `namespaces`, else `default`."""
    lease_seconds: float = 30.0
    """How long the Lease holds without being renewed."""
    identity: str = ""
    """Holder name in the Lease, unique per process (the pod's name). Empty: the host's name."""
    health_bind_port: int = 8080
    """Port of `/healthz`. Not called HEALTH_PORT: a Service of that name would set the variable to a URL."""
    metrics_bind_port: int = 9090
    """Port of `/metrics`; 0 serves none."""
    max_silence_seconds: float = 60.0
    """`/healthz` fails when the tick, or a watch that should have spoken, has been silent for so long."""
    log_format: str = "json"
    """`json` (one object a line) or `plain`."""
    log_level: str = "INFO"
    """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""

    @property
    def effective_lease_namespace(self) -> str:
        return self.lease_namespace or (self.namespaces[0] if self.namespaces else "default")

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> OperatorSettings:
        """Defaults overridden by `environ`. SettingsError lists all problems, unknown variables of ours included."""
        problems: list[str] = []
        values: dict[str, Any] = {}
        known = {PREFIX + field.name.upper(): field for field in fields(cls)}
        for variable, text in sorted(environ.items()):
            if not variable.startswith(PREFIX):
                continue
            field = known.get(variable)
            if field is None:
                if not _SERVICE_LINK.search(variable):
                    problems.append(f"{variable}: unknown setting")
                continue
            try:
                values[field.name] = _PARSERS[str(field.type)](text.strip())
            except ValueError as error:
                problems.append(f"{variable}={text!r}: {error}")
        settings = cls(**values)
        problems.extend(f"{PREFIX}{name.upper()}: {problem}" for name, problem in _check(settings))
        if problems:
            raise SettingsError(problems)
        return settings


def _check(settings: OperatorSettings) -> list[tuple[str, str]]:
    positive = (
        "tick_seconds", "resync_seconds", "scrape_deadline_seconds", "scrape_concurrency", "request_timeout_seconds",
        "workers", "max_backoff_seconds", "lease_seconds", "max_silence_seconds",
    )  # fmt: skip
    problems = [(name, "must be above 0") for name in positive if not getattr(settings, name) > 0]
    problems += [("namespaces", f"{ns!r} is no namespace name") for ns in settings.namespaces if not _is_name(ns)]
    for name in ("health_bind_port", "metrics_bind_port"):
        if not 0 <= getattr(settings, name) <= 65535:
            problems.append((name, "must be a port number"))
    if settings.health_bind_port == settings.metrics_bind_port != 0:
        problems.append(("metrics_bind_port", "must differ from the health port"))
    if settings.lease_namespace and not _is_name(settings.lease_namespace):
        problems.append(("lease_namespace", f"{settings.lease_namespace!r} is no namespace name"))
    if not settings.lease_name:
        problems.append(("lease_name", "must not be empty"))
    if settings.scrape_deadline_seconds >= settings.tick_seconds:
        problems.append(("scrape_deadline_seconds", f"must be below tick_seconds ({settings.tick_seconds})"))
    if settings.log_format not in ("json", "plain"):
        problems.append(("log_format", "must be json or plain"))
    if settings.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        problems.append(("log_level", "must be DEBUG, INFO, WARNING or ERROR"))
    return problems


def _is_name(text: str) -> bool:
    return _NAMESPACE.fullmatch(text) is not None


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number of seconds") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("must be finite")
    return value


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


_PARSERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": _parse_int,
    "float": _parse_float,
    "tuple[str, ...]": _parse_names,
}
