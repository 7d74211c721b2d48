"""The operator's own metrics, on a registry that is given. Names and labels are listed in `docs/contracts/metrics.md`.

Labels are bounded: kinds of errors, verbs, resources, reasons, and one series per object, removed with the object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpilot_operator.core.keys import NamespacedName

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_OBJECT = ("namespace", "deployment")


class OperatorMetrics:
    """Every collector of the operator. Methods say what happened; they decide nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._reconcile_seconds = Histogram(
            "kvpilot_operator_reconcile_seconds",
            "Time of one pass over one object.",
            ("outcome",),
            registry=registry,
            buckets=_RECONCILE_BUCKETS,
        )
        self._errors = Counter(
            "kvpilot_operator_reconcile_errors", "Passes that failed, by kind of error.", ("kind",), registry=registry
        )
        self._api_calls = Counter(
            "kvpilot_operator_api_calls",
            "Answers of the API server; code 0 is no answer.",
            ("verb", "resource", "code"),
            registry=registry,
        )
        self._scrape_errors = Counter(
            "kvpilot_operator_scrape_errors",
            "Engines that could not be read, by reason.",
            ("reason",),
            registry=registry,
        )
        self._queue_depth = Gauge("kvpilot_operator_queue_depth", "Objects that wait for a worker.", registry=registry)
        self._tick_age = Gauge("kvpilot_operator_tick_age_seconds", "Time since the last tick.", registry=registry)
        self._leader = Gauge(
            "kvpilot_operator_lease_held", "1 while this process holds the lease and may write.", registry=registry
        )
        self._missing_fields = Gauge(
            "kvpilot_operator_crd_missing_fields",
            "Fields that this operator needs and the installed CustomResourceDefinition lacks; NaN: unknown.",
            registry=registry,
        )
        self._missing_fields.set(math.nan)
        self._replicas = Gauge(
            "kvpilot_operator_replicas",
            "Replicas of an object by state (desired, current, ready, unknown).",
            (*_OBJECT, "state"),
            registry=registry,
        )
        self._cap = Gauge(
            "kvpilot_operator_memory_utilization",
            "Device-memory cap that the object's engines are told, as a share 0..1.",
            _OBJECT,
            registry=registry,
        )
        self._ooms = Counter(
            "kvpilot_operator_oom_events",
            "Out-of-memory events that were classified, by class.",
            (*_OBJECT, "kind"),
            registry=registry,
        )
        for outcome in ("ok", "error"):
            self._reconcile_seconds.labels(outcome)

    def observe_reconcile(self, seconds: float, *, outcome: str) -> None:
        self._reconcile_seconds.labels(outcome).observe(seconds)

    def count_error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def count_api_call(self, verb: str, resource: str, status: int) -> None:
        self._api_calls.labels(verb, resource, str(status)).inc()

    def count_scrape_error(self, reason: str) -> None:
        self._scrape_errors.labels(reason).inc()

    def set_queue_depth(self, depth: int) -> None:
        self._queue_depth.set(depth)

    def set_tick_age(self, seconds: float) -> None:
        self._tick_age.set(seconds)

    def set_lease_held(self, *, held: bool) -> None:
        self._leader.set(1 if held else 0)

    def set_missing_fields(self, count: int | None) -> None:
        """`count` None: the installed schema could not be read."""
        self._missing_fields.set(math.nan if count is None else count)

    def set_object(self, key: NamespacedName, *, replicas: Mapping[str, int], utilization: float | None) -> None:
        """The gauges of one object. `utilization` None: the object has no cap yet."""
        for state, count in replicas.items():
            self._replicas.labels(key.namespace, key.name, state).set(count)
        if utilization is not None:
            self._cap.labels(key.namespace, key.name).set(utilization)

    def count_oom(self, key: NamespacedName, kind: str) -> None:
        self._ooms.labels(key.namespace, key.name, kind).inc()

    def forget_object(self, key: NamespacedName) -> None:
        """Series of an object that is gone would otherwise show its last values for ever."""
        labels = {"namespace": key.namespace, "deployment": key.name}
        for collector in (self._replicas, self._cap, self._ooms):
            collector.remove_by_labels(labels)
