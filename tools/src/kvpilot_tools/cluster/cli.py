"""The command line: `kvpilot-cluster COMMAND`. Parses, calls, prints; every decision is made elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpilot_tools.cluster.assets import ALL_ASSETS, API_ONLY_ASSETS, AssetStore
from kvpilot_tools.cluster.errors import ClusterError, RequirementError
from kvpilot_tools.cluster.layout import DEFAULT_NAME, ClusterLayout, layout_for
from kvpilot_tools.cluster.progress import Progress

if TYPE_CHECKING:
    from kvpilot_tools.cluster.images import ImageStore


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
    up.add_argument("--gpus", type=int, default=4, help="GPUs that the node claims to have (default: %(default)s)")
    up.add_argument(
        "--engine-env",
        type=Path,
        metavar="VENV",
        help="the environment that engine pods may mount (default: the one this command runs in)",
    )
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="stop it and remove all that it made")
    _add_name(down)
    down.add_argument("--purge", action="store_true", help="also forget the images that the node was given")
    down.set_defaults(run=_down)

    status = commands.add_parser("status", help="what runs; exit status 3 when it is not ready")
    _add_name(status)
    status.set_defaults(run=_status)

    load = commands.add_parser("load-image", help="give an image to the node: an archive, or one that was built here")
    load.add_argument("image", metavar="ARCHIVE.tar|IMAGE")
    _add_name(load)
    load.set_defaults(run=_load_image)

    base = commands.add_parser("base-image", help="make the base image of the local builds, once")
    base.add_argument("--load", action="store_true", help="and give it to the node")
    _add_name(base)
    base.set_defaults(run=_base_image)

    image = commands.add_parser("build-image", help="build a Dockerfile on the base image")
    image.add_argument("dockerfile", type=Path)
    image.add_argument("--tag", required=True)
    image.add_argument("--context", type=Path, help="the folder to build in (default: the Dockerfile's)")
    image.add_argument("--if-missing", action="store_true", help="do nothing when the tag is there")
    image.add_argument("--load", action="store_true", help="and give it to the node")
    _add_name(image)
    image.set_defaults(run=_build_image)

    kubeconfig = commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    _add_name(kubeconfig)
    kubeconfig.set_defaults(run=_kubeconfig)
    return parser


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster (default: %(default)s)")


def _build(_options: argparse.Namespace, progress: Progress) -> int:
    binaries = AssetStore.from_environ(os.environ).ensure(ALL_ASSETS, progress)
    print(f"kvpilot-cluster build: {len(binaries)} binaries ready")
    return 0


def _up(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster import engine_env, local_cluster
    from kvpilot_tools.cluster.kubeconfig import chosen_cluster

    chosen = chosen_cluster(os.environ)
    if chosen is not None and not options.api_only:
        print(f"kvpilot-cluster up: nothing started, KVPILOT_KUBECONFIG names the context {chosen.context}")
        return 0
    layout = layout_for(options.name)
    if options.api_only:
        return _up_api_only(layout, options, progress)
    environment = options.engine_env or engine_env.default_environment()
    result = local_cluster.up(layout, gpus=options.gpus, environment=environment, environ=os.environ, progress=progress)
    if result.was_running:
        print(f"kvpilot-cluster up: it runs already; export KUBECONFIG={layout.kubeconfig}")
    else:
        print(
            f"kvpilot-cluster up: control plane ready after {result.control_plane_s:.1f} s, node after"
            f" {result.node_s:.1f} s; export KUBECONFIG={layout.kubeconfig}"
        )
    return 0


def _up_api_only(layout: ClusterLayout, options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster import local_cluster
    from kvpilot_tools.cluster.api_server import start_api_only
    from kvpilot_tools.cluster.record import load_record

    binaries = AssetStore.from_environ(os.environ).ensure(API_ONLY_ASSETS, progress)
    with local_cluster.locked(layout, progress):
        record = load_record(layout.settings_file)
        if record is not None and record.has_node:
            raise RequirementError(f"the cluster {layout.name!r} has a node; give the API server another --name")
        if record is not None and record.has_controllers == options.with_controllers:
            state = local_cluster.inspect(layout, binaries)
            if state is not None and state.is_ready:
                print(f"kvpilot-cluster up: it runs already; export KUBECONFIG={layout.kubeconfig}")
                return 0
        start_api_only(
            layout,
            binaries,
            with_controllers=options.with_controllers,
            owner=None,
            environ=os.environ,
            progress=progress,
        )
    print(f"kvpilot-cluster up: ready after {progress.elapsed_s:.1f} s; export KUBECONFIG={layout.kubeconfig}")
    return 0


def _down(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster import local_cluster

    layout = layout_for(options.name)
    existed = layout.root.exists()
    seconds = local_cluster.down(layout, progress, purge=options.purge)
    print(f"kvpilot-cluster down: {f'removed in {seconds:.1f} s' if existed else 'there was nothing'}")
    return 0


def _status(options: argparse.Namespace, _progress: Progress) -> int:
    from kvpilot_tools.cluster import local_cluster

    layout = layout_for(options.name)
    store = AssetStore.from_environ(os.environ)
    # Only names matter here: a daemon is looked up by its pid file, so a binary that is gone by now is no obstacle.
    binaries = {asset.name: store.find(asset) or Path(asset.name) for asset in ALL_ASSETS}
    state = local_cluster.inspect(layout, binaries)
    if state is None:
        print(f"kvpilot-cluster status: there is no cluster {layout.name!r}")
        return 3
    kind = "with a node" if state.record.has_node else "API server only"
    print(f"{layout.name}: {kind}, {'ready' if state.is_ready else 'not ready'}")
    print(f"  running: {', '.join(state.running) or 'nothing'}")
    if state.stopped:
        print(f"  stopped: {', '.join(state.stopped)} (`kvpilot-cluster up` starts afresh)")
    print(f"  kubeconfig: {layout.kubeconfig}\n  logs: {layout.logs}")
    return 0 if state.is_ready else 3


def _load_image(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster import node_images
    from kvpilot_tools.cluster.images import ImageStore

    layout = layout_for(options.name)
    _existing_kubeconfig(layout)
    if Path(options.image).is_file():
        node_images.import_image(layout, Path(options.image).resolve())
    else:
        store = ImageStore(os.environ, progress)
        store.prepare()
        if not store.has(options.image):
            raise RequirementError(f"{options.image!r} is neither a file nor an image that was built here")
        store.load(options.image, layout)
    print(f"kvpilot-cluster load-image: {options.image} is on the node after {progress.elapsed_s:.1f} s")
    return 0


def _base_image(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster.images import BASE_REFERENCE, ImageStore

    store = ImageStore(os.environ, progress)
    store.prepare()
    made = store.make_base()
    if options.load:
        _load_if_missing(store, BASE_REFERENCE, options.name, is_new=made)
    print(
        f"kvpilot-cluster base-image: {BASE_REFERENCE} {'made' if made else 'was there'} ({progress.elapsed_s:.1f} s)"
    )
    return 0


def _build_image(options: argparse.Namespace, progress: Progress) -> int:
    from kvpilot_tools.cluster.images import ImageStore

    store = ImageStore(os.environ, progress)
    store.prepare()
    was_there = options.if_missing and store.has(options.tag)
    if not was_there:
        store.make_base()
        store.build(options.dockerfile, options.tag, options.context or options.dockerfile.resolve().parent)
    if options.load:
        _load_if_missing(store, options.tag, options.name, is_new=not was_there)
    what = "was there" if was_there else "built"
    print(f"kvpilot-cluster build-image: {options.tag} {what} ({progress.elapsed_s:.1f} s)")
    return 0


def _load_if_missing(store: ImageStore, reference: str, name: str, *, is_new: bool = False) -> None:
    from kvpilot_tools.cluster import node_images

    layout = layout_for(name)
    _existing_kubeconfig(layout)
    if is_new or reference not in node_images.image_names(layout):
        store.load(reference, layout)


def _kubeconfig(options: argparse.Namespace, _progress: Progress) -> int:
    from kvpilot_tools.cluster.kubeconfig import chosen_cluster

    chosen = chosen_cluster(os.environ)
    print(chosen.kubeconfig if chosen is not None else _existing_kubeconfig(layout_for(options.name)))
    return 0


def _existing_kubeconfig(layout: ClusterLayout) -> Path:
    if not layout.kubeconfig.exists():
        raise RequirementError(f"the cluster {layout.name!r} is not up; `kvpilot-cluster up` starts it")
    return layout.kubeconfig
