"""The operator's metrics: as documented, and gone with their object."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.observability.metrics import OperatorMetrics
from kvpilot_tools.repository import ROOT

KEY = NamespacedName("team-a", "llama")
_ROW = re.compile(r"^\| `(kvpilot_operator_\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)


@pytest.fixture
def metrics() -> OperatorMetrics:
    return OperatorMetrics(CollectorRegistry())


def use_everything(metrics: OperatorMetrics) -> None:
    metrics.observe_reconcile(0.1, outcome="ok")
    metrics.count_error("Transient")
    metrics.count_api_call("list", "pods", 200)
    metrics.count_scrape_error("Timeout")
    metrics.set_object(KEY, replicas={"desired": 2}, utilization=0.9)
    metrics.count_oom(KEY, "HostOOM")


def test_the_documented_list_is_what_is_exported(metrics: OperatorMetrics) -> None:
    use_everything(metrics)
    exported: dict[str, tuple[str, set[str]]] = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        exported[name] = (family.type, labels)
    text = (ROOT / "docs" / "contracts" / "metrics.md").read_text()
    documented = {name: (type_, set(re.findall(r"`(\w+)`", labels))) for name, type_, labels in _ROW.findall(text)}
    assert documented == exported


def test_missing_fields_are_unknown_until_they_are_counted(metrics: OperatorMetrics) -> None:  # C25
    name = b"kvpilot_operator_crd_missing_fields"
    assert name + b" NaN" in generate_latest(metrics.registry)
    metrics.set_missing_fields(3)
    assert name + b" 3.0" in generate_latest(metrics.registry)
    metrics.set_missing_fields(None)
    assert name + b" NaN" in generate_latest(metrics.registry)


def test_series_of_a_gone_object_are_gone(metrics: OperatorMetrics) -> None:  # D6
    use_everything(metrics)
    metrics.set_object(NamespacedName("team-b", "llama"), replicas={"desired": 7}, utilization=0.8)
    assert b'namespace="team-a"' in generate_latest(metrics.registry)
    metrics.forget_object(KEY)
    text = generate_latest(metrics.registry)
    assert b'namespace="team-a"' not in text
    assert b'namespace="team-b"' in text
