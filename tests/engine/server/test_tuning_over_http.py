"""The operator's view of a changing cap: the file is written, /engine/state acknowledges it, no request is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.service.testing import BYTES_PER_BLOCK, FakeModelLoader

Kit = Any
Start = Any
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 30


def write(path: Path, revision: int, utilization: float) -> None:
    """Swap the file in one step, as the kubelet does."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"revision": revision, "memory_utilization": {"default": utilization}}))
    temporary.replace(path)


async def state_when(kit: Kit, revision: int, state: str) -> Any:
    """The first answer that acknowledges the revision with this state."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await (await kit.client.get("/engine/state")).json()
            if (answer["tuning"]["revision"], answer["tuning"]["state"]) == (revision, state):
                return answer
            await asyncio.sleep(0.005)


async def test_each_revision_is_acknowledged_with_what_became_of_it(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 1, 0.12)
    # One block holds a whole request, so that none needs another one while the cap is below what is in use.
    loader = FakeModelLoader(block_size=128, max_model_len=128, step_s=0.02)
    kit = await start(loader, service={"tuning_file": path})
    capped = await state_when(kit, 1, "applied")
    assert (capped["load"]["blocks_total"], capped["load"]["blocks_held_out"]) == (12, 88)

    write(path, 2, 0.2)
    raised = await state_when(kit, 2, "applied")
    assert (raised["tuning"]["utilization"], raised["load"]["blocks_total"]) == (0.2, 20)
    assert raised["memory"]["kv_reserved_bytes"] == 20 * BYTES_PER_BLOCK

    calls = [asyncio.create_task(kit.complete(f"{i}", max_tokens=100, ignore_eos=True)) for i in range(8)]
    await kit.until(lambda: kit.gauges() == (8, 0, 8))
    write(path, 3, 0.05)
    shrinking = await state_when(kit, 3, "deferred")
    assert shrinking["tuning"]["bytes_to_go"] == 3 * BYTES_PER_BLOCK
    assert (shrinking["load"]["running"], shrinking["load"]["blocks_free"]) == (8, 0)
    answers = [await (await call).json() for call in calls]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 8
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [100] * 8
    shrunk = await state_when(kit, 3, "applied")
    assert (shrunk["tuning"]["bytes_to_go"], shrunk["load"]["blocks_total"]) == (0, 5)
    assert shrunk["load"]["preemptions_total"] == 0

    write(path, 4, 0.001)
    refused = await state_when(kit, 4, "rejected")
    assert (refused["tuning"]["utilization"], refused["tuning"]["requested_utilization"]) == (0.05, 0.001)
    assert "0.01" in refused["tuning"]["reason"]
    assert refused["load"]["blocks_total"] == 5
    samples = await kit.scrape()
    assert samples['kvpilot_engine_tuning_revision{state="rejected"}'] == 4
    assert samples["kvpilot_engine_memory_utilization_ratio"] == 0.05
    assert (await kit.complete("x", max_tokens=1)).status == 200
