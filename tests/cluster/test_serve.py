"""Helm install, apply the example, Ready, and a chat answer through the Service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvpilot_tools.kubectl import Kubectl
from kvpilot_tools.manifests import example

pytestmark = pytest.mark.cluster

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Japan?"}]


def test_the_example_answers_streamed_and_not(
    cluster: Kubectl, apply_ready: Callable[..., dict[str, Any]], service_url: Callable[[str], str]
) -> None:
    item = apply_ready(example())
    name = item["metadata"]["name"]
    client = OpenAI(base_url=f"{service_url(name)}/v1", api_key="unused", timeout=120, max_retries=0)

    assert [m.id for m in client.models.list()] == [name]
    whole = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Tokyo" in text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24

    pieces: list[str] = []
    reasons: list[str | None] = []
    stream = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=24, temperature=0, stream=True)
    for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        reasons.append(chunk.choices[0].finish_reason)
    assert "".join(pieces) == text
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]

    status = cluster.get("llmdeployment", name)["status"]  # type: ignore[index]
    assert status["readyReplicas"] == 1
    assert status["memory"]["plan"]["kvTokens"] > 0
    assert "True" in cluster.run("get", "llmd", name)


def test_nothing_of_ours_carries_a_finalizer_or_a_framework_annotation(
    cluster: Kubectl, apply_ready: Callable[..., dict[str, Any]]
) -> None:  # C2
    name = apply_ready(example())["metadata"]["name"]
    for kind in ("llmdeployments", "deployments", "services", "configmaps", "poddisruptionbudgets", "pods"):
        for item in cluster.list(kind, selector="" if kind == "llmdeployments" else f"kvpilot.dev/deployment={name}"):
            assert not item["metadata"].get("finalizers"), kind
            assert not [a for a in item["metadata"].get("annotations", {}) if "kopf" in a], kind


def test_the_engine_pod_is_restricted(cluster: Kubectl, apply_ready: Callable[..., dict[str, Any]]) -> None:
    name = apply_ready(example())["metadata"]["name"]
    (pod,) = cluster.list("pods", selector=f"kvpilot.dev/deployment={name}")
    container = next(c for c in pod["spec"]["containers"] if c["name"] == "engine")
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_pod_loads_the_kernels_that_came_along(cluster: Kubectl, apply_ready: Callable[..., dict[str, Any]]) -> None:
    name = apply_ready(example())["metadata"]["name"]
    log = cluster.run("logs", "--selector", f"kvpilot.dev/deployment={name}", "--container=engine", "--tail=-1")
    assert "kernels: none compiled, all loaded from /var/lib/kvpilot/cache/" in log, log
