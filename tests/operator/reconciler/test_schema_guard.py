"""An installed schema that is older than the operator: said, and mended by whoever reads it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import yaml

from kvpilot_operator.core.ports import Manifest
from kvpilot_operator.core.schema_check import OPENAPI_PATH, needed_fields
from kvpilot_operator.errors import RefusedError
from kvpilot_operator.schema_guard import SchemaGuard
from kvpilot_operator.testing import FakeKubeApi
from kvpilot_tools.repository import ROOT


def publish(*, without: str | None = None) -> Manifest:
    """The document that the API server makes of our schema, without one field of spec.scaling."""
    crd = yaml.safe_load((ROOT / "crds" / "llmdeployments.yaml").read_text())
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    if without is not None:
        del schema["properties"]["spec"]["properties"]["scaling"]["properties"][without]
    kind = {"group": "kvpilot.dev", "version": "v1alpha1", "kind": "LLMDeployment"}
    return {"components": {"schemas": {"x": {**schema, "x-kubernetes-group-version-kind": [kind]}}}}


class Watched:
    """A guard, what it reads, and what it told the metric."""

    def __init__(self) -> None:
        self.api = FakeKubeApi()
        self.told: list[int | None] = []
        self.guard = SchemaGuard(self.api, recheck_s=600, on_checked=self.told.append)


@pytest.fixture
def watched() -> Watched:
    return Watched()


async def test_nothing_is_promised_before_the_first_look(watched: Watched) -> None:
    assert watched.guard.problem
    watched.api.openapi[OPENAPI_PATH] = publish()
    assert await watched.guard.check()
    assert watched.guard.problem is None
    assert watched.told == [0]


async def test_missing_fields_are_named_with_the_remedy_and_logged_once(  # C25
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.api.openapi[OPENAPI_PATH] = publish(without="maxReplicas")
    assert not await watched.guard.check()
    assert not await watched.guard.check()
    assert watched.guard.problem is not None
    assert "spec.scaling.maxReplicas" in watched.guard.problem
    assert "spec.scaling.minReplicas" not in watched.guard.problem
    assert "crds.install=true" in watched.guard.problem
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [watched.guard.problem]
    watched.api.openapi[OPENAPI_PATH] = publish()
    assert await watched.guard.check()
    assert watched.guard.problem is None
    assert watched.told == [1, 1, 0]


async def test_no_schema_at_all_is_a_problem(watched: Watched) -> None:  # C25
    assert not await watched.guard.check()
    assert watched.guard.problem is not None
    assert "not installed" in watched.guard.problem
    assert watched.told == [len(needed_fields())]


async def test_what_can_not_be_read_changes_no_verdict(watched: Watched) -> None:
    watched.api.errors["get", "openapi"] = RefusedError("HTTP 403")
    assert not await watched.guard.check()
    assert watched.guard.problem is None
    del watched.api.errors["get", "openapi"]
    watched.api.openapi[OPENAPI_PATH] = publish(without="maxReplicas")
    assert not await watched.guard.check()
    watched.api.errors["get", "openapi"] = RefusedError("HTTP 403")
    assert not await watched.guard.check()
    assert watched.guard.problem is not None
    assert watched.told == [None, 1, None]
