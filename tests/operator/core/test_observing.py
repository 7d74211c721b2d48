"""Who writes the replicas, told from the Deployment's managed fields."""

from __future__ import annotations

import pytest

from kvpilot_operator.core.observing import find_foreign_scaler

REPLICAS: dict[str, object] = {"f:spec": {"f:replicas": {}}}


def written_by(manager: str, subresource: str | None, operation: str = "Update") -> dict[str, object]:
    entry: dict[str, object] = {"manager": manager, "operation": operation, "fieldsV1": REPLICAS}
    return entry if subresource is None else {**entry, "subresource": subresource}


def test_an_autoscaler_is_told_by_its_write_through_scale() -> None:  # C20
    deployment = {"metadata": {"managedFields": [written_by("kube-controller-manager", "scale")]}}
    assert "kube-controller-manager" in find_foreign_scaler(deployment, own_manager="kvpilot")


@pytest.mark.parametrize(
    "entry",
    [
        written_by("kvpilot", "scale", "Apply"),
        # A real API server notes this beside our own first apply; taken for an autoscaler it stopped all scaling.
        written_by("before-first-apply", "scale"),
        written_by("kubectl", "scale"),
        written_by("kubectl-edit", None),
        written_by("kube-controller-manager", "status"),
    ],
    ids=lambda entry: f"{entry['manager']}/{entry.get('subresource')}",
)
def test_nobody_else_is_taken_for_one(entry: dict[str, object]) -> None:
    if entry.get("subresource") == "status":
        entry = {**entry, "fieldsV1": {"f:status": {"f:replicas": {}}}}
    assert find_foreign_scaler({"metadata": {"managedFields": [entry]}}, own_manager="kvpilot") == ""
