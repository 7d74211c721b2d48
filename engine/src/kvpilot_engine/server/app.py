"""Builds the aiohttp application: routes, and one middleware for request id, key, errors and their count.

Building it starts nothing; `cli` runs it, tests run it on a test server.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry

from kvpilot_engine.observability.logging_setup import request_id_var
from kvpilot_engine.observability.metric_families import EngineReading
from kvpilot_engine.observability.metrics import EngineMetrics
from kvpilot_engine.server import openai_routes, ops_routes
from kvpilot_engine.server.app_context import CONTEXT, AppContext
from kvpilot_engine.server.error_mapping import CODES, ErrorAnswer, map_error
from kvpilot_engine.server.json_body import json_response
from kvpilot_engine.server.request_id import REQUEST_ID_HEADER, assign_request_id
from kvpilot_engine.server.settings import ServerSettings
from kvpilot_engine.service.async_engine import AsyncEngine, EngineState
from kvpilot_engine.service.messages import StepOutputs

_LOG = logging.getLogger(__name__)


def create_app(engine: AsyncEngine, settings: ServerSettings, registry: CollectorRegistry) -> web.Application:
    """The application. Its AppContext (`app[CONTEXT]`) gets the text when that is loaded."""
    metrics = EngineMetrics(
        registry,
        model_name=settings.served_names[0],
        rejection_codes=CODES,
        read=lambda: read_engine(engine, settings.served_names[0]),
    )
    engine.subscribe(lambda step: _observe_step(metrics, step))
    context = AppContext(engine, settings, metrics)
    # Bodies are read with our own limit (json_body); aiohttp's would be 1 MiB.
    app = web.Application(middlewares=[_middleware], client_max_size=0)
    app[CONTEXT] = context
    app[ops_routes.REGISTRY] = registry
    app.add_routes(openai_routes.routes)
    app.add_routes(ops_routes.routes)

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


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    context = request.app[CONTEXT]
    request_id = assign_request_id(request)
    token = request_id_var.set(request_id)
    try:
        _check_key(request, context.settings.api_key)
        response = await handler(request)
    except Exception as error:  # noqa: BLE001  the one place that turns errors into answers
        answer = map_error(error)
        if answer.status >= 500:
            _LOG.error("%s %s: %s", request.method, request.path, answer.code, exc_info=_trace_of(error, answer))
        context.metrics.count_rejection(answer.code, is_overload=answer.status == 429)
        response = _error_response(answer, error)
    finally:
        request_id_var.reset(token)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


def _trace_of(error: Exception, answer: ErrorAnswer) -> Exception | None:
    """A trace for what nobody expected; not for an engine that loads or drains."""
    return error if answer.status == 500 else None


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


def _check_key(request: web.Request, api_key: str) -> None:
    if not api_key or not request.path.startswith("/v1"):
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), api_key.encode()):
        raise web.HTTPUnauthorized(text="the API key is missing or wrong")
