"""The composition root: the only place that builds the real parts, joins them, and tells kopf how to behave.

Holds no policy. kopf watches and calls the handlers; everything else (queue, tick, lease, retries) is ours, so that
kopf never writes to an object: no finalizer, no annotation, no event.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kopf
from aiohttp import web
from kubernetes.aio.client import ApiClient
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvpilot_operator.adapters.clock import SystemClock
from kvpilot_operator.adapters.engine_client import HttpEngineClient
from kvpilot_operator.adapters.kube_api import KubernetesApi
from kvpilot_operator.adapters.kube_login import load_configuration, load_login
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.naming import LABEL_DEPLOYMENT
from kvpilot_operator.core.ports import Clock
from kvpilot_operator.core.resources import LLM_DEPLOYMENTS, PODS, WATCHED_RESOURCES
from kvpilot_operator.errors import ConflictError, OperatorError, RefusedError, TransientError
from kvpilot_operator.lease import LeaseGuard
from kvpilot_operator.observability.metrics import OperatorMetrics
from kvpilot_operator.reconciler import Reconciler
from kvpilot_operator.schema_guard import SchemaGuard
from kvpilot_operator.settings import OperatorSettings
from kvpilot_operator.ticker import Ticker
from kvpilot_operator.watch_monitor import WatchMonitor
from kvpilot_operator.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_REFUSED_RETRY_S = 30.0


class _EndlessBackoffs:
    """kopf's pauses between tries of one request: growing, then steady, and never over.

    With a finite list kopf would end the whole operator over an API server that is away for a minute.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (1.0, 2.0, 4.0, 8.0, 15.0)
        while True:
            yield 30.0


def configure_kopf(settings: kopf.OperatorSettings, *, request_timeout_s: float) -> None:
    """kopf as a watcher only."""
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    settings.networking.request_timeout = request_timeout_s
    settings.networking.error_backoffs = _EndlessBackoffs()
    settings.queueing.worker_limit = None
    for resource in WATCHED_RESOURCES:
        if resource is not LLM_DEPLOYMENTS:
            selector = (resource.group, resource.version, resource.plural)
            settings.watching.label_selectors[selector] = LABEL_DEPLOYMENT
    # One line for every event of every pod otherwise.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)


async def log_in() -> kopf.ConnectionInfo:
    """The connection for kopf's watches; asked for again when the API server answers 401 (a rotated token)."""
    login = await load_login()
    return kopf.ConnectionInfo(
        server=login.server,
        ca_path=login.ca_path,
        insecure=login.insecure,
        scheme="Bearer" if login.token else None,
        token=login.token,
        certificate_path=login.certificate_path,
        private_key_path=login.private_key_path,
    )


@dataclass(kw_only=True)
class Operator:
    """The running parts. Handlers know this object and nothing below it."""

    settings: OperatorSettings
    clock: Clock
    api: KubernetesApi
    engines: HttpEngineClient
    metrics: OperatorMetrics
    monitor: WatchMonitor
    lease: LeaseGuard
    schema: SchemaGuard
    reconciler: Reconciler
    queue: WorkQueue
    ticker: Ticker
    web_runner: web.AppRunner | None = None

    def on_object_event(self, event: Mapping[str, Any]) -> None:
        """An LLMDeployment appeared, changed or went."""
        key = self._note(event)
        if event["type"] == "DELETED":
            self.ticker.forget(key)
        else:
            self.ticker.remember(key)
        self.queue.add(key)

    def on_child_event(self, event: Mapping[str, Any]) -> None:
        """Something that carries our label appeared, changed or went: its object is due."""
        key = self._note(event)
        owner = event["object"].get("metadata", {}).get("labels", {}).get(LABEL_DEPLOYMENT)
        if owner:
            if event["object"].get("kind") != PODS.kind:
                self.reconciler.note_child_change(NamespacedName(key.namespace, owner))
            self.queue.add(NamespacedName(key.namespace, owner))

    def check_health(self) -> dict[str, float]:
        """What the liveness probe shows; RuntimeError when the operator has stopped doing its work."""
        ages = {
            "tickAgeSeconds": round(self.ticker.compute_age(), 1),
            "watchSilenceSeconds": round(self.monitor.compute_silence(), 1),
        }
        limit_s = max(self.settings.max_silence_seconds, 3 * self.settings.tick_seconds)
        silent = [name for name, age in ages.items() if age > limit_s]
        if silent:
            raise RuntimeError(f"silent for more than {limit_s:g} s: {', '.join(silent)} {ages}")
        return ages

    async def start(self) -> None:
        self.lease.start()
        self.schema.start()
        self.queue.start()
        self.ticker.start()
        if self.settings.metrics_bind_port:
            await self._serve_metrics()

    async def stop(self) -> None:
        """In the reverse order; the lease last, once nothing writes any more."""
        if self.web_runner is not None:
            await self.web_runner.cleanup()
        await self.ticker.stop()
        await self.queue.stop()
        await self.schema.stop()
        await self.lease.stop()
        await self.engines.close()
        await self.api.close()

    async def work(self, key: NamespacedName) -> float | None:
        """One pass over one object, measured. Without the lease nothing is observed and nothing written."""
        if not self.lease.is_held:
            self.reconciler.let_go()
            return None
        started = self.clock.monotonic()
        outcome = "error"
        try:
            due_s = await self.reconciler.reconcile(key)
            outcome = "ok"
        finally:
            self.metrics.observe_reconcile(self.clock.monotonic() - started, outcome=outcome)
        return due_s

    def _note(self, event: Mapping[str, Any]) -> NamespacedName:
        manifest = event["object"]
        if event["type"] == "DELETED":
            self.monitor.saw_deleted(manifest)
        else:
            self.monitor.saw(manifest)
        return NamespacedName(manifest["metadata"]["namespace"], manifest["metadata"]["name"])

    async def _serve_metrics(self) -> None:
        async def show_metrics(_request: web.Request) -> web.Response:
            self.metrics.set_queue_depth(len(self.queue))
            self.metrics.set_tick_age(self.ticker.compute_age())
            self.metrics.set_lease_held(held=self.lease.is_held)
            return web.Response(
                body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
            )

        async def show_readiness(_request: web.Request) -> web.Response:
            held, problem = self.lease.is_held, self.schema.problem
            body = {"leaseHeld": held, **({} if problem is None else {"problem": problem})}
            return web.json_response(body, status=200 if held and problem is None else 503)

        app = web.Application()
        app.add_routes([web.get("/metrics", show_metrics), web.get("/readyz", show_readiness)])
        self.web_runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await self.web_runner.setup()
        await web.TCPSite(self.web_runner, None, self.settings.metrics_bind_port).start()


async def build_operator(settings: OperatorSettings) -> Operator:
    """Everything joined, nothing started. Call it inside the event loop that it will run in."""
    clock = SystemClock()
    metrics = OperatorMetrics(CollectorRegistry())
    monitor = WatchMonitor(clock, kinds=frozenset(resource.kind for resource in WATCHED_RESOURCES))
    api = KubernetesApi(
        ApiClient(await load_configuration()),
        timeout_s=settings.request_timeout_seconds,
        on_call=metrics.count_api_call,
        on_written=monitor.expect,
    )
    engines = HttpEngineClient(
        deadline_s=settings.scrape_deadline_seconds,
        max_concurrency=settings.scrape_concurrency,
        on_error=metrics.count_scrape_error,
    )
    lease = LeaseGuard(
        api,
        clock,
        namespace=settings.effective_lease_namespace,
        name=settings.lease_name,
        identity=settings.identity or socket.gethostname(),
        duration_s=settings.lease_seconds,
    )
    schema = SchemaGuard(api, recheck_s=settings.resync_seconds, on_checked=metrics.set_missing_fields)
    reconciler = Reconciler(api, engines, clock, default_engine_image=settings.default_engine_image, recorder=metrics)

    async def work(key: NamespacedName) -> float | None:
        return await operator.work(key)

    def report(key: NamespacedName, error: Exception, delay_s: float) -> None:
        report_error(metrics, key, error, delay_s)

    queue = WorkQueue(
        work,
        workers=settings.workers,
        max_backoff_s=settings.max_backoff_seconds,
        retry_after=suggest_retry,
        on_error=report,
    )
    ticker = Ticker(
        api,
        queue,
        clock,
        namespaces=settings.namespaces,
        tick_s=settings.tick_seconds,
        resync_s=settings.resync_seconds,
        on_listed=monitor.expect,
    )
    operator = Operator(
        settings=settings,
        clock=clock,
        api=api,
        engines=engines,
        metrics=metrics,
        monitor=monitor,
        lease=lease,
        schema=schema,
        reconciler=reconciler,
        queue=queue,
        ticker=ticker,
    )
    return operator


def suggest_retry(error: Exception) -> float | None:
    """The one place that says after how long a failed pass is worth trying again; None: the queue's own pause."""
    if isinstance(error, TransientError):
        return error.retry_after_s
    if isinstance(error, RefusedError):
        return error.retry_after_s or _REFUSED_RETRY_S
    return None


def report_error(metrics: OperatorMetrics, key: NamespacedName, error: Exception, delay_s: float) -> None:
    """Count and log a failed pass. Only a bug has a traceback: what the API server refused explains itself."""
    extra = {"key": str(key), "event": "ReconcileFailed"}
    if isinstance(error, OperatorError):
        metrics.count_error(error.kind)
        # A lost race is how optimistic locking works, and nothing that anybody has to look at.
        level = logging.INFO if isinstance(error, ConflictError) else logging.WARNING
        logger.log(level, "%s; trying again in %.0f s", error, delay_s, extra=extra)
    else:
        metrics.count_error("Bug")
        logger.error("a bug; trying again in %.0f s", delay_s, extra=extra, exc_info=error)
