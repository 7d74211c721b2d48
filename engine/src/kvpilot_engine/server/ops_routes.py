"""Paths for the platform: probes, metrics, and the two JSON views of docs/contracts/engine-http.md.

Never behind the API key. Answered from the newest snapshot alone, so also while the engine loads or a step takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.server.advice_view import describe_block_size
from kvpilot_engine.server.app_context import CONTEXT, AppContext
from kvpilot_engine.server.json_body import json_response
from kvpilot_engine.server.memory_table import build_memory_lines, describe_memory
from kvpilot_engine.service.messages import EngineSnapshot

SCHEMA = 1
REGISTRY = web.AppKey("registry", CollectorRegistry)
ENGINE_VERSION = version("kvpilot-engine")
routes = web.RouteTableDef()


@routes.get("/livez")
async def livez(request: web.Request) -> web.Response:
    return _probe(request, lambda context: context.engine.is_alive)


@routes.get("/readyz")
@routes.get("/health")
async def readyz(request: web.Request) -> web.Response:
    return _probe(request, lambda context: context.is_ready)


@routes.get("/version")
async def show_version(_: web.Request) -> web.Response:
    return json_response({"version": ENGINE_VERSION})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(request.app[REGISTRY]), headers={"Content-Type": content_type})


@routes.get("/engine/memory")
async def memory(request: web.Request) -> web.Response:
    snapshot = request.app[CONTEXT].engine.snapshot
    report = None if snapshot is None else snapshot.memory
    return json_response(
        {
            "memory": describe_memory(report),
            "block_size": None if snapshot is None else describe_block_size(snapshot),
            "lines": build_memory_lines(report),
        }
    )


@routes.get("/engine/state")
async def state(request: web.Request) -> web.Response:
    raw = request.query.get("since", "0")
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 18):
        raise InvalidRequestError(f"since is {raw[:40]!r}; a sequence number of at least 0 is needed", param="since")
    return json_response(describe_state(request.app[CONTEXT], since=int(raw)))


def describe_state(context: AppContext, *, since: int) -> dict[str, object]:
    engine = context.engine
    snapshot = engine.snapshot
    age = engine.snapshot_age_s
    is_text_missing = engine.is_ready and context.text is None
    return {
        "schema": SCHEMA,
        "version": ENGINE_VERSION,
        "served_names": list(context.settings.served_names),
        "state": "loading" if is_text_missing else engine.state.value,
        "state_reason": engine.state_reason,
        "snapshot_age_s": None if age is None else round(age, 3),
        "uptime_s": round(engine.uptime_s, 3),
        "load": None if snapshot is None else _describe_load(snapshot),
        "memory": None if snapshot is None else describe_memory(snapshot.memory),
        "tuning": None if snapshot is None else asdict(snapshot.tuning),
        "oom_seq": engine.oom_seq,
        "oom_events": [asdict(event) for event in engine.oom_events if event.seq > since],
        "start_failures": [
            {key: value for key, value in asdict(failure).items() if key != "suggested_utilization"}
            for failure in engine.start_failures
        ],
    }


def _describe_load(snapshot: EngineSnapshot) -> dict[str, object]:
    stats = snapshot.stats
    return {
        "kv_usage_ratio": stats.kv_usage_ratio,
        "kv_cached_ratio": stats.kv_cached_ratio,
        "running": stats.num_running,
        "waiting": stats.num_waiting_capacity + stats.num_waiting_budget,
        "waiting_capacity": stats.num_waiting_capacity,
        "waiting_budget": stats.num_waiting_budget,
        "blocks_total": stats.num_blocks_total,
        "blocks_free": stats.num_blocks_free,
        "blocks_used": stats.num_blocks_used,
        "blocks_cached": stats.num_blocks_cached,
        "blocks_held_out": stats.num_blocks_held_out,
        "block_size": stats.block_size,
        "preemptions_total": stats.num_preemptions_total,
        "recomputed_tokens_total": stats.num_recomputed_tokens_total,
        "prompt_tokens_total": stats.num_prompt_tokens_total,
        "generation_tokens_total": stats.num_generation_tokens_total,
    }


def _probe(request: web.Request, is_good: Callable[[AppContext], bool]) -> web.Response:
    context = request.app[CONTEXT]
    good = is_good(context)
    body = {"status": "ok" if good else "unavailable", "state": context.engine.state.value}
    return json_response(body, status=200 if good else 503)
