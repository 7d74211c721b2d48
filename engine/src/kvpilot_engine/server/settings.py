"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    served_names: tuple[str, ...]
    """Names that requests may use; the first one is shown in answers and metrics. Never empty."""
    host: str = "0.0.0.0"  # noqa: S104  a server in a pod listens on every address
    port: int = 8000
    api_key: str = ""
    """When set, /v1 asks for `Authorization: Bearer KEY`; probes, metrics and the operator's paths stay open."""
    drain_timeout_s: float = 110.0
    """Seconds from SIGTERM until what still runs is cut off; below the pod's grace period."""
    drain_grace_s: float = 5.0
    """Seconds after SIGTERM in which late arrivals are still served: endpoints take a moment to leave the Service."""
    keep_alive_s: float = 15.0
    """A silent stream gets a comment line this often, so that proxies keep the connection."""
    request_timeout_s: float = 1800.0
    """Deadline of one request; what has not ended by then is aborted."""
