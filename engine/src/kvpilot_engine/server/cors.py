"""Cross-origin requests: which pages of which sites may call this server from a browser. Off unless origins are set.

A preflight (OPTIONS with Access-Control-Request-Method) is answered here, before keys and routes: browsers send it
without a key.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

_ANY = "*"
_MAX_AGE_S = "600"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsSettings:
    allowed_origins: tuple[str, ...] = ()
    """Empty: off; `*`: every site."""
    allowed_methods: tuple[str, ...] = (_ANY,)
    allowed_headers: tuple[str, ...] = (_ANY,)
    allow_credentials: bool = False


class Cors:
    def __init__(self, settings: CorsSettings) -> None:
        self._settings = settings
        self._takes_all = _ANY in settings.allowed_origins

    def answer_preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight; None when the request is none, or this is off."""
        wanted = request.headers.get("Access-Control-Request-Method")
        origin = request.headers.get("Origin")
        if not self._settings.allowed_origins or request.method != "OPTIONS" or not wanted or not origin:
            return None
        if not self._is_allowed(origin) or not _is_in(wanted, self._settings.allowed_methods):
            raise web.HTTPBadRequest(text=f"cross-origin {wanted[:20]} from {origin[:200]} is not allowed")
        asked = request.headers.get("Access-Control-Request-Headers", "")
        allows_all = _ANY in self._settings.allowed_headers
        headers = {
            "Access-Control-Allow-Methods": wanted
            if _ANY in self._settings.allowed_methods
            else _join(self._settings.allowed_methods),
            "Access-Control-Max-Age": _MAX_AGE_S,
        }
        if asked:
            headers["Access-Control-Allow-Headers"] = asked if allows_all else _join(self._settings.allowed_headers)
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For the application's on_response_prepare: streams and errors get the headers too."""
        origin = request.headers.get("Origin")
        if not self._settings.allowed_origins or origin is None or not self._is_allowed(origin):
            return
        # A wildcard is not allowed together with credentials, so the origin itself is named then.
        names_all = self._takes_all and not self._settings.allow_credentials
        response.headers["Access-Control-Allow-Origin"] = _ANY if names_all else origin
        response.headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"
        if self._settings.allow_credentials:
            response.headers["Access-Control-Allow-Credentials"] = "true"
        if not names_all:
            response.headers["Vary"] = "Origin"

    def _is_allowed(self, origin: str) -> bool:
        return self._takes_all or origin in self._settings.allowed_origins


def _is_in(value: str, allowed: tuple[str, ...]) -> bool:
    return _ANY in allowed or value in allowed


def _join(values: tuple[str, ...]) -> str:
    return ", ".join(values)
