"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvpilot_engine.server.cors import CorsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    served_names: tuple[str, ...]
    """Names that requests may use; the first one is shown in answers and metrics. Never empty."""
    model_root: str = ""
    """What the names stand for, shown in /v1/models; empty: the first name."""
    host: str = "0.0.0.0"  # noqa: S104  a server in a pod listens on every address
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """When any is set (here or in the file), /v1 asks for `Authorization: Bearer KEY`; other paths stay open."""
    api_key_file: Path | None = None
    """More keys, one a line; read once at the start."""
    cors: CorsSettings = field(default_factory=CorsSettings)
    cache_salt_header: str = ""
    """The header in which a trusted gateway sends the cache salt; a body may hold none then. Empty: bodies may."""
    max_logprobs: int = 20
    """Most log-probabilities of alternatives that a request may ask for, per token."""
    drain_timeout_s: float = 110.0
    """Seconds from SIGTERM until what still runs is cut off; below the pod's grace period."""
    drain_grace_s: float = 5.0
    """Seconds after SIGTERM in which late arrivals are still served: endpoints take a moment to leave the Service."""
    keep_alive_s: float = 15.0
    """A silent stream gets a comment line this often, so that proxies keep the connection."""
    request_timeout_s: float = 1800.0
    """Deadline of one request; what has not ended by then is aborted. A client may ask for a shorter one."""
