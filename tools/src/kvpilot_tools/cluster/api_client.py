"""A few calls to the API server with the administrator's certificate: is it ready, what does an object say, patch it.

Not a Kubernetes client: only what bringing a cluster up needs, without any dependency to import.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpilot_tools.cluster.errors import ClusterError

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ApiClient:
    """Speaks to one API server on this machine."""

    port: int
    authority: Path
    certificate: Path
    key: Path

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority))
        context.load_cert_chain(str(self.certificate), str(self.key))
        return context

    def is_ready(self) -> bool:
        """Tell whether the server answers and says that it is ready; never raises."""
        try:
            status, _ = self._call("GET", "/readyz")
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the object at that path; None when there is none."""
        status, body = self._call("GET", path)
        return None if status == 404 else _parsed("GET", path, status, body)

    def post(self, path: str, body: object) -> dict[str, Any]:
        """Create an object."""
        status, answer = self._call("POST", path, json.dumps(body).encode(), "application/json")
        return _parsed("POST", path, status, answer)

    def patch(self, path: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
        """Apply a JSON patch."""
        status, body = self._call("PATCH", path, json.dumps(operations).encode(), "application/json-patch+json")
        return _parsed("PATCH", path, status, body)

    def _call(self, method: str, path: str, body: bytes | None = None, kind: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT_S, context=self._tls)
        try:
            connection.request(method, path, body=body, headers={"Content-Type": kind} if kind else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _parsed(method: str, path: str, status: int, body: bytes) -> dict[str, Any]:
    if status >= 300:
        raise ClusterError(f"{method} {path}: HTTP {status}: {body[:300].decode(errors='replace')}")
    parsed = json.loads(body)
    if not isinstance(parsed, dict):
        raise ClusterError(f"{method} {path}: the answer is not an object")
    return parsed
