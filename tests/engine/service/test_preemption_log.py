"""Whoever runs the engine can see which request lost work, and how much of the work is done twice."""

from __future__ import annotations

import logging
import os
from multiprocessing import Pipe

import pytest

from kvpilot_engine.service.engine_process import ChildStart, EngineLoop, MonotonicClock
from kvpilot_engine.service.messages import AddRequest
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.testing import FakeModelLoader
from kvpilot_engine.testing import make_request


def test_each_preemption_is_one_log_line_with_the_tokens_lost(caplog: pytest.LogCaptureFixture) -> None:  # A4
    """Two requests that grow to 25 blocks each in a pool of 32."""
    loader = FakeModelLoader(max_model_len=128, block_size=4)
    start = ChildStart(loader=loader, settings=ServiceSettings(), utilization=0.32, parent_pid=os.getpid())
    here, there = Pipe()
    with here, there, caplog.at_level(logging.INFO, logger="kvpilot_engine.service.engine_process"):
        loop = EngineLoop(there, loader.load(0.32), start, MonotonicClock())
        for name in ("first", "second"):
            here.send(AddRequest(make_request(name, (64,), max_tokens=99)))
        loop._drain_commands()
        while loop._core.has_work:
            loop._step()
    lines = [record.getMessage() for record in caplog.records if "preempted" in record.getMessage()]
    stats = loop._core.stats()
    assert len(lines) == stats.num_preemptions_total > 0
    lost = []
    for number, line in enumerate(lines, start=1):
        assert line.startswith("request second preempted for want of KV blocks: ")
        assert line.endswith(f" computed tokens lost, preemption {number} of this request")
        lost.append(int(line.split(": ")[1].split()[0]))
    assert 0 < stats.num_recomputed_tokens_total <= sum(lost)
