"""The advice on the block size as /engine/memory tells it."""

from __future__ import annotations

from kvpilot_engine.core.block_size_advice import BlockSizeAdvisor
from kvpilot_engine.core.stats import EngineStats
from kvpilot_engine.server.advice_view import describe_block_size
from kvpilot_engine.service.messages import EngineSnapshot, TuningStatus
from kvpilot_engine.service.testing import BYTES_PER_BLOCK, FakeModelLoader


def test_waste_and_saving_are_told_in_tokens_and_bytes() -> None:
    advisor = BlockSizeAdvisor(32)
    advisor.note(33, 1)
    model = FakeModelLoader(block_size=32).load(0.5)
    snapshot = EngineSnapshot(
        sent_at=0.0,
        stats=EngineStats(block_size=32, block_size_advice=advisor.advise()),
        memory=model.memory_report(utilization=0.5, num_usable_blocks=50, num_used_blocks=0),
        tuning=TuningStatus(),
    )
    view = describe_block_size(snapshot)
    assert (view["present"], view["recommended"], view["requests"]) == (32, 8, 1)
    assert view["saved_tokens"] == 31 - 7
    assert view["saved_bytes"] == round(24 * BYTES_PER_BLOCK / 32)
    assert view["present_cost"] == {
        "block_size": 32,
        "waste_ratio": round(31 / 64, 5),
        "wasted_tokens": 31.0,
        "wasted_bytes": round(31 * BYTES_PER_BLOCK / 32),
        "table_len": 2.0,
    }
    assert view["prompt_lengths"] == {"64": 1}
    assert view["output_lengths"] == {"16": 1}
