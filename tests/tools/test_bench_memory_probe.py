"""What the stress harness says about memory and progress: each source alone, and none where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvpilot_tools.bench import stress
from kvpilot_tools.bench.load import LiveCounts
from kvpilot_tools.bench.memory_probe import nvml_probe, process_tree_bytes, watch_memory


class NVMLError(Exception):
    pass


def make_nvml(*, used: list[int], devices: int = 1) -> Any:
    """The three functions of the package that are called, on this many devices; used up, the driver is gone."""

    def get_handle(index: int) -> int:
        if index >= devices:
            raise NVMLError
        return index

    def get_memory(handle: int) -> SimpleNamespace:
        if not used:
            raise NVMLError
        return SimpleNamespace(used=used.pop(0) + handle)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=get_handle,
        nvmlDeviceGetMemoryInfo=get_memory,
    )


@pytest.mark.asyncio
async def test_the_highest_use_of_a_device_is_kept_also_when_it_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(used=[7, 5]))
    probe = nvml_probe(0)
    assert probe is not None
    async with watch_memory([probe]) as seen:
        assert seen.peaks == {"nvml": 7}
    assert (await probe.read(), seen.peaks) == (None, {"nvml": 7})


def test_without_device_driver_or_package_there_is_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_nvml(used=[], devices=1))
    assert nvml_probe(1) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_probe(0) is None


def test_a_process_is_counted_while_it_lives() -> None:
    own = process_tree_bytes(os.getpid())
    assert own is not None
    assert own > 10 << 20
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert process_tree_bytes(gone.pid) is None


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = LiveCounts(num_requests=21, sent=3, ended=1)
    with stress.show_progress("m at http://x") as show:
        show(counts)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(stress, "_LINE_PERIOD_S", 0.0)
        show(counts)
    line = capsys.readouterr().err
    assert line.startswith("m at http://x: ")
    assert "1/21 ended, 2 in flight" in line
    assert line.count("\n") == 1
