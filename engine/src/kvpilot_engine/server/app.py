"""Builds the aiohttp application: routes, and one middleware for request id, key, errors, their count, and the log.

Building it starts nothing; `cli` runs it, tests run it on a test server.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry

from kvpilot_engine.observability.logging_setup import request_id_var
from kvpilot_engine.observability.metric_families import EngineReading
from kvpilot_engine.observability.metrics import EngineMetrics
from kvpilot_engine.server import openai_routes, openapi, ops_routes
from kvpilot_engine.server.api_keys import ApiKeys, read_key_file
from kvpilot_engine.server.app_context import CONTEXT, AppContext
from kvpilot_engine.server.call_log import CLIENT_GONE, call_log_of
from kvpilot_engine.server.cors import Cors
from kvpilot_engine.server.error_mapping import CODES, ErrorAnswer, map_error
from kvpilot_engine.server.json_body import json_response
from kvpilot_engine.server.request_id import add_request_id, assign_request_id
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.service.async_engine import AsyncEngine, EngineState
from kvpilot_engine.service.messages import StepOutputs

_LOG = logging.getLogger(__name__)
_API_KEYS = web.AppKey("api_keys", ApiKeys)
_CORS = web.AppKey("cors", Cors)


def create_app(engine: AsyncEngine, settings: ServerSettings, registry: CollectorRegistry) -> web.Application:
    """The application. Its AppContext (`app[CONTEXT]`) gets the text when that is loaded. Raises SettingsError."""
    metrics = EngineMetrics(
        registry,
        model_name=settings.served_names[0],
        rejection_codes=CODES,
        read=lambda: read_engine(engine, settings.served_names[0]),
    )
    engine.subscribe(lambda step: _observe_step(metrics, step))
    context = AppContext(engine, settings, metrics, fingerprint=_fingerprint(settings))
    file_keys = () if settings.api_key_file is None else read_key_file(settings.api_key_file)
    # Bodies are read with our own limit (json_body); aiohttp's would be 1 MiB.
    app = web.Application(middlewares=[_middleware], client_max_size=0)
    app[CONTEXT] = context
    app[_API_KEYS] = ApiKeys((*settings.api_keys, *file_keys))
    app[_CORS] = cors = Cors(settings.cors)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(cors.add_headers)
    app[ops_routes.REGISTRY] = registry
    app.add_routes(openai_routes.routes)
    app.add_routes(ops_routes.routes)
    app.add_routes(openapi.routes)

    async def close(_: web.Application) -> None:
        context.close()

    app.on_cleanup.append(close)
    return app


def read_engine(engine: AsyncEngine, model_name: str) -> EngineReading:
    """What a scrape sees: nothing is left over from a child that is dead."""
    snapshot = engine.snapshot
    reading = EngineReading(
        model_name=model_name,
        version=ops_routes.ENGINE_VERSION,
        state=engine.state.value,
        snapshot_age_s=engine.snapshot_age_s,
        oom_counts=engine.oom_counts,
    )
    if snapshot is None:
        return reading
    stats = snapshot.stats
    if engine.state is EngineState.FAILED:
        stats = replace(
            stats, num_running=0, num_waiting_capacity=0, num_waiting_budget=0, num_swapped_out=0, num_blocks_used=0
        )
    return replace(
        reading,
        stats=stats,
        memory=snapshot.memory,
        tuning_revision=snapshot.tuning.revision,
        tuning_state=snapshot.tuning.state,
    )


def _observe_step(metrics: EngineMetrics, step: StepOutputs) -> None:
    if step.step_kind:
        metrics.observe_step(step.step_kind, step.step_s, step.queue_times_s)


def _fingerprint(settings: ServerSettings) -> str:
    digest = hashlib.sha256((settings.model_root or settings.served_names[0]).encode("utf-8", "surrogateescape"))
    return f"kvpilot-{ops_routes.ENGINE_VERSION}-{digest.hexdigest()[:8]}"


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request_id_var.set(assign_request_id(request))
    status, code = CLIENT_GONE, None
    try:
        try:
            response = await _handle(request, handler)
            status = response.status
        except Exception as error:  # noqa: BLE001  the one place that turns errors into answers
            answer = map_error(error)
            if answer.status >= 500:
                trace = error if answer.is_unexpected else None
                _LOG.error("%s %s: %s", request.method, request.path, answer.code, exc_info=trace)
            request.app[CONTEXT].metrics.count_rejection(answer.code, is_overload=answer.status == 429)
            status, code = answer.status, answer.code
            response = _error_response(answer, error)
        return response
    finally:
        _write_call_log(request, status, code)
        request_id_var.reset(token)


async def _handle(request: web.Request, handler: Handler) -> web.StreamResponse:
    preflight = request.app[_CORS].answer_preflight(request)
    if preflight is not None:
        return preflight
    request.app[_API_KEYS].check(request)
    return await handler(request)


def _write_call_log(request: web.Request, status: int, code: str | None) -> None:
    log = call_log_of(request)
    if log is None:
        return
    log.status = log.status or status
    log.error = log.error or code
    log.write(request.app[CONTEXT].monotonic())


def _error_response(answer: ErrorAnswer, error: Exception) -> web.Response:
    headers = {} if answer.retry_after_s is None else {"Retry-After": str(answer.retry_after_s)}
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = error.headers["Allow"]
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(answer.body, status=answer.status, headers=headers)
    if answer.status == 413:
        response.force_close()  # the rest of the body is not read
    return response
