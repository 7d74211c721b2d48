"""Load drives KV use up: one replica becomes two and goes back, no request is lost, and the object says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvpilot_tools.kubectl import Kubectl, wait_for
from kvpilot_tools.manifests import variant
from kvpilot_tools.traffic import Outcomes, drive

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PRESSURE: dict[str, Any] = {
    # A small pool (2,048 tokens), and a queue target out of reach: KV use alone must drive it.
    "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    "engine": {"maxModelLen": 512, "maxNumSeqs": 8, "extraArgs": ["--num-gpu-blocks-override", "128"]},
    "scaling": {
        "minReplicas": 1,
        "maxReplicas": 2,
        "targets": {"kvUsage": 0.3, "waitingPerReplica": 100},
        "scaleDownStabilizationSeconds": 20,
    },
}


def decisions(item: dict[str, Any]) -> list[dict[str, Any]]:
    return [d for d in item["status"].get("decisions", []) if d["loop"] == "Replicas"]


def test_load_scales_up_and_back_without_losing_a_request(
    cluster: Kubectl, apply_ready: Callable[..., dict[str, Any]], service_url: Callable[[str], str]
) -> None:
    name = "elastic"
    apply_ready(variant(name, **PRESSURE))
    url = service_url(name)
    seen = Outcomes()
    highest: list[int] = []
    two_serve = asyncio.Event()

    def item() -> dict[str, Any]:
        found = cluster.get("llmdeployment", name)
        assert found is not None
        return found

    async def watch() -> None:
        while True:
            status = (await asyncio.to_thread(item))["status"]
            highest.append(status.get("readyReplicas", 0))
            if highest[-1] == 2:
                two_serve.set()
            await asyncio.sleep(1.0)

    async def until_two_serve() -> None:
        watcher = asyncio.create_task(watch())
        traffic = asyncio.create_task(
            drive(url, name, streams=12, seconds=120, prompt_words=30, max_tokens=40, seen=seen)
        )
        try:
            await asyncio.wait_for(two_serve.wait(), timeout=180)
            await traffic
        finally:
            watcher.cancel()

    asyncio.run(until_two_serve())
    assert max(highest) == 2, item()["status"]
    ups = [d for d in decisions(item()) if d["to"] > d["from"]]
    assert ups
    assert ups[0]["message"]
    assert ups[0]["reason"] == "KVPressure"
    assert ups[0]["inputs"]["kvUsage"] > PRESSURE["scaling"]["targets"]["kvUsage"]

    back = wait_for(
        lambda: (
            item()
            if item()["status"]["replicas"] == 1
            and len(cluster.list("pods", selector=f"kvpilot.dev/deployment={name}")) == 1
            else None
        ),
        "one replica again",
        limit_s=180,
        report=lambda: str(item()["status"]),
    )
    downs = [d for d in decisions(back) if d["to"] < d["from"]]
    assert [(d["from"], d["to"]) for d in downs] == [(2, 1)]
    assert not seen.lost, seen.lost[:5]
    assert sum(seen.finished.values()) > 0
    assert set(seen.finished) == {"length"}
