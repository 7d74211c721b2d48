"""The command line: `kvpilot-cluster COMMAND`. Parses, calls, prints; every decision is made elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpilot_tools.cluster.assets import ALL_ASSETS, API_ONLY_ASSETS, AssetStore
from kvpilot_tools.cluster.errors import ClusterError, RequirementError
from kvpilot_tools.cluster.layout import DEFAULT_NAME, ClusterLayout, layout_for
from kvpilot_tools.cluster.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1: it failed and said why)."""
    options = build_parser().parse_args(argv)
    try:
        return int(options.run(options, Progress()))
    except ClusterError as error:
        print(f"kvpilot-cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvpilot-cluster: interrupted; `kvpilot-cluster down` removes what was started", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(prog="kvpilot-cluster", description="A real Kubernetes on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="find or build the binaries, nothing else")
    build.set_defaults(run=_build)

    up = commands.add_parser("up", help="start the cluster; quick when it runs already")
    _add_name(up)
    up.add_argument("--api-only", action="store_true", help="etcd and the API server alone: no root needed, no pods")
    up.add_argument("--with-controllers", action="store_true", help="with --api-only: the controller manager too")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="stop it and remove all that it made")
    _add_name(down)
    down.set_defaults(run=_down)

    kubeconfig = commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    _add_name(kubeconfig)
    kubeconfig.set_defaults(run=_kubeconfig)
    return parser


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster (default: %(default)s)")


def _build(options: argparse.Namespace, progress: Progress) -> int:
    binaries = AssetStore.from_environ(os.environ).ensure(ALL_ASSETS, progress)
    print(f"kvpilot-cluster build: {len(binaries)} binaries ready")
    return 0


def _up(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster.api_server import start_api_only

    layout = layout_for(options.name)
    binaries = AssetStore.from_environ(os.environ).ensure(API_ONLY_ASSETS, progress)
    start_api_only(
        layout,
        binaries,
        with_controllers=options.with_controllers,
        owner=None,
        environ=os.environ,
        progress=progress,
    )
    _print_ready(layout, progress)
    return 0


def _down(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster.api_server import remove_api_only

    remove_api_only(layout_for(options.name))
    return 0


def _kubeconfig(options: argparse.Namespace, progress: Progress) -> int:
    path = _existing_kubeconfig(layout_for(options.name))
    print(path)
    return 0


def _existing_kubeconfig(layout: ClusterLayout) -> Path:
    if not layout.kubeconfig.exists():
        raise RequirementError(f"the cluster {layout.name!r} is not up; `kvpilot-cluster up` starts it")
    return layout.kubeconfig


def _print_ready(layout: ClusterLayout, progress: Progress) -> None:
    print(f"kvpilot-cluster up: ready after {progress.elapsed_s:.1f} s; export KUBECONFIG={layout.kubeconfig}")
