"""The tuning file followed by a running child, and what the ledger does over several starts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpilot_engine.service.async_engine import EngineState
from kvpilot_engine.service.messages import TuningStatus
from kvpilot_engine.service.testing import FakeModelLoader

EngineKit = Any


def write(path: Path, revision: int, default: float, **pods: float) -> None:
    """Swap the file in one step, as the kubelet does."""
    shares = {"default": default, "pods": pods}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"revision": revision, "memory_utilization": shares}))
    temporary.replace(path)


def tuning_of(engine: Any) -> TuningStatus:
    status = engine.snapshot.tuning
    assert isinstance(status, TuningStatus)
    return status


async def test_engine_starts_from_the_file(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 7, 0.6)
    engine = await kit.start(tuning_file=path, gpu_memory_utilization=0.9)
    assert engine.snapshot.stats.num_blocks_total == 60
    assert tuning_of(engine) == TuningStatus(revision=7, state="applied", utilization=0.6, requested_utilization=0.6)


async def test_changed_share_is_applied_and_acknowledged(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 1, 0.9)
    engine = await kit.start(tuning_file=path, pod_uid="me")
    write(path, 2, 0.9, me=0.5)
    await kit.until(lambda: tuning_of(engine).revision == 2)
    assert (tuning_of(engine).state, tuning_of(engine).utilization) == ("applied", 0.5)
    assert engine.snapshot.stats.num_blocks_total == 50
    assert engine.snapshot.memory.utilization == 0.5
    write(path, 3, 0.8)
    await kit.until(lambda: tuning_of(engine).revision == 3)
    assert engine.snapshot.stats.num_blocks_total == 80


async def test_shrink_below_what_is_in_use_is_deferred_until_it_is_free(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 1, 0.9)
    engine = await kit.start(FakeModelLoader(step_s=0.05, max_model_len=128), tuning_file=path)
    request = {"max_tokens": 60, "ignore_eos": True}
    streams = [engine.generate([kit.request(f"r{i}", prompt=chr(97 + i) * 60, **request)]) for i in range(3)]
    await kit.until(lambda: engine.snapshot.stats.num_blocks_used > 40)
    write(path, 2, 0.35)
    await kit.until(lambda: tuning_of(engine).revision == 2)
    assert tuning_of(engine).state == "deferred"
    assert tuning_of(engine).bytes_to_go > 0
    for stream in streams:
        stream.close()
    await kit.until(lambda: tuning_of(engine).state == "applied")
    assert tuning_of(engine).bytes_to_go == 0
    assert engine.snapshot.stats.num_blocks_total == 35


async def test_share_below_the_floor_is_rejected_with_the_floor(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 1, 0.9)
    engine = await kit.start(tuning_file=path)
    write(path, 2, 0.1)
    await kit.until(lambda: tuning_of(engine).revision == 2)
    status = tuning_of(engine)
    assert (status.state, status.utilization, status.requested_utilization) == ("rejected", 0.9, 0.1)
    assert "0.32" in status.reason
    assert engine.snapshot.stats.num_blocks_total == 90


async def test_start_whose_share_can_t_be_put_in_force_ends_with_72(kit: EngineKit, tmp_path: Path) -> None:  # A16
    path = tmp_path / "tuning.json"
    write(path, 1, 0.1)
    engine = await kit.start(wait_ready=False, tuning_file=path)
    failure = await asyncio.wait_for(engine.wait_failed(), 20)
    assert (failure.exit_code, failure.termination["reason"]) == (72, "ModelDoesNotFit")
    assert failure.termination["suggested"] == {"utilization": 0.32, "max_model_len": 40}
    assert (failure.termination["requested_bytes"], failure.termination["limit_bytes"]) == (32_000, 10_000)


async def test_broken_file_is_reported_and_the_value_stays(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 3, 0.8)
    engine = await kit.start(tuning_file=path)
    path.write_text("{")
    await kit.until(lambda: tuning_of(engine).state == "rejected")
    assert tuning_of(engine).revision == 3
    assert "JSON" in tuning_of(engine).reason
    assert engine.snapshot.stats.num_blocks_total == 80


async def test_starts_after_an_oom_step_down_until_one_works(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 5, 0.9)
    loader = FakeModelLoader(oom_above=0.85)
    shares = []
    for _ in range(2):
        failed = await kit.start(loader, wait_ready=False, tuning_file=path, state_dir=tmp_path)
        failure = await failed.wait_failed()
        assert failure.exit_code == 71
        shares.append(failure.termination["utilization"])
    engine = await kit.start(loader, tuning_file=path, state_dir=tmp_path)
    assert shares == [0.9, 0.87]
    status = tuning_of(engine)
    assert (status.revision, status.state, status.requested_utilization) == (5, "rejected", 0.9)
    assert status.utilization == pytest.approx(0.841)
    assert "OOM" in status.reason
    assert engine.start_failures == ()


async def test_process_is_held_after_three_failures_until_the_revision_changes(kit: EngineKit, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, 5, 0.9)
    loader = FakeModelLoader(oom_above=0.6)
    for _ in range(3):
        failed = await kit.start(loader, wait_ready=False, tuning_file=path, state_dir=tmp_path)
        await failed.wait_failed()
    engine = await kit.start(loader, wait_ready=False, tuning_file=path, state_dir=tmp_path)
    assert (engine.state, engine.state_reason) == (EngineState.HELD, "OOMUnresolved")
    assert engine.is_alive
    assert not engine.is_ready
    assert engine.child_pid is None
    assert len(engine.start_failures) == 3
    write(path, 6, 0.5)
    await kit.until(lambda: engine.is_ready)
    assert tuning_of(engine).revision == 6
    assert engine.state_reason == ""


async def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from pathlib import Path
from kvpilot_engine.service.async_engine import AsyncEngine
from kvpilot_engine.service.settings import ServiceSettings
from kvpilot_engine.service.testing import FakeModelLoader

async def main():
    engine = AsyncEngine(FakeModelLoader(), ServiceSettings())
    await engine.start()
    while not engine.is_ready:
        await asyncio.sleep(0.01)
    Path({str(tmp_path / "pid")!r}).write_text(str(engine.child_pid))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    process = await asyncio.create_subprocess_exec(sys.executable, str(script))
    assert await asyncio.wait_for(process.wait(), 30) == -9
    pid = int((tmp_path / "pid").read_text())
    async with asyncio.timeout(10):
        while _runs(pid):  # noqa: ASYNC110  the condition is another process
            await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    """A zombie that nobody reaps in this container counts as ended."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
