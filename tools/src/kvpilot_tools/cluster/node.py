"""The node: containerd with its own folders, the pod network, the kubelet and kube-proxy.

Not for the control plane, nor for cleaning. Invariant: nothing here uses the system's containerd, the system's
kubelet folder or the system's CNI configuration, so a machine that has those keeps them undisturbed.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from kvpilot_tools.cluster import cgroups, mounts, node_config, node_images, pause_image
from kvpilot_tools.cluster.control_plane import NODE_NAME, START_LIMIT_S, ControlPlane
from kvpilot_tools.cluster.errors import StartError
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.processes import Daemon, stop
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.cluster.requirements import require_program

GPU_RESOURCE = "nvidia.com/gpu"
RUNTIME_LIMIT_S = 20.0
MAX_OWN_IMAGES = 16
"""Each change of the operator makes an image of its own; above this the node starts without those of earlier runs."""

_OWN_IMAGES = "localhost/"
_NODE_PATH = f"/api/v1/nodes/{NODE_NAME}"


@dataclass(frozen=True, slots=True)
class Node:
    """The node of one cluster."""

    plane: ControlPlane

    @property
    def _layout(self) -> ClusterLayout:
        return self.plane.layout

    def write_config(self) -> None:
        """Write all configuration files and make the folders that daemons expect."""
        layout, ports = self._layout, self.plane.record.ports
        plugins = require_program("cni:bridge").parent
        (layout.config / "cni").mkdir(exist_ok=True)
        for folder in (layout.image_store, layout.containerd_state, layout.kubelet_root, layout.logs / "pods"):
            folder.mkdir(parents=True, exist_ok=True)
        runtime = node_config.render_containerd(layout, plugins)
        (layout.config / "containerd.toml").write_text(runtime)
        (layout.config / "cni" / "kvpilot.conflist").write_text(json.dumps(node_config.build_cni_config(layout)))
        kubelet = node_config.build_kubelet_config(layout, ports.kubelet, ports.kubelet_health)
        (layout.config / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
        credentials = layout.config / "kube-proxy.kubeconfig"
        proxy = node_config.build_proxy_config(credentials, ports.proxy_health, ports.proxy_metrics)
        (layout.config / "kube-proxy.yaml").write_text(yaml.safe_dump(proxy))

    def containerd(self) -> Daemon:
        """The container runtime."""
        layout = self._layout
        return Daemon(
            name="containerd",
            argv=(str(require_program("containerd")), f"--config={layout.config}/containerd.toml"),
            log=layout.logs / "containerd.log",
            pidfile=layout.pids / "containerd.json",
        )

    def kubelet(self) -> Daemon:
        """The kubelet."""
        layout = self._layout
        return self.plane.daemon(
            "kubelet",
            f"--config={layout.config}/kubelet.yaml",
            f"--kubeconfig={layout.config}/kubelet.kubeconfig",
            f"--root-dir={layout.kubelet_root}",
            f"--cert-dir={layout.pki}/kubelet",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={self.plane.record.node_ip}",
        )

    def proxy(self) -> Daemon:
        """The service proxy."""
        return self.plane.daemon("kube-proxy", f"--config={self._layout.config}/kube-proxy.yaml")

    def daemons(self) -> list[Daemon]:
        """Every component that this node should be running."""
        return [self.containerd(), self.kubelet(), self.proxy()]

    def start_runtime(self, environ: Mapping[str, str], progress: Progress) -> None:
        """Start containerd and give it the pause image; needs no control plane."""
        layout = self._layout
        cgroups.make_group(cgroups.group_name(layout.name))
        self._start_containerd(environ, progress)
        if node_images.forget_containers(layout):
            # It has read them already, and would report them to the kubelet.
            self._stop_containerd()
            self._start_containerd(environ, progress)
        names = node_images.image_names(layout)
        if len([name for name in names if name.startswith(_OWN_IMAGES)]) > MAX_OWN_IMAGES:
            progress.line("forgetting the images of earlier runs, there are many")
            node_images.remove_images(layout, sorted(names))
        if pause_image.REFERENCE not in node_images.image_names(layout):
            archive = layout.root / "pause.tar"
            pause_image.write_archive(self.plane.binaries["pause"], archive)
            node_images.import_image(layout, archive)
            archive.unlink()

    def _start_containerd(self, environ: Mapping[str, str], progress: Progress) -> None:
        containerd = self.containerd()
        containerd.start(environ)
        try:
            containerd.wait_ready(
                lambda: node_images.can_list(self._layout), limit_s=RUNTIME_LIMIT_S, beat=progress.beat
            )
        except StartError as error:
            # The store outlives clusters; one that was damaged must not stop every later one.
            progress.line(f"starting with an empty image store ({error.args[0].splitlines()[0]})")
            self._stop_containerd()
            mounts.release(self._layout.image_store)
            mounts.remove_tree(self._layout.image_store)
            self._layout.image_store.mkdir(parents=True)
            containerd.start(environ)
            containerd.wait_ready(
                lambda: node_images.can_list(self._layout), limit_s=RUNTIME_LIMIT_S, beat=progress.beat
            )

    def _stop_containerd(self) -> None:
        process = self.containerd().process()
        if process is not None:
            stop([process], grace_s=5)

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the kubelet and kube-proxy; needs the API server."""
        self.kubelet().start(environ)
        self.proxy().start(environ)

    def wait_ready(self, progress: Progress) -> None:
        """Return when pods can be scheduled and services are reachable."""
        kubelet, proxy = self.kubelet(), self.proxy()
        kubelet.wait_ready(self._is_schedulable, limit_s=START_LIMIT_S, beat=progress.beat)
        proxy.wait_ready(self._proxy_is_healthy, limit_s=START_LIMIT_S, beat=progress.beat)
        kubelet.wait_ready(self._accounts_exist, limit_s=START_LIMIT_S, beat=progress.beat)

    def offer_gpus(self, count: int) -> None:
        """Give the node GPUs that do not exist, so that scheduling against them is real."""
        name = GPU_RESOURCE.replace("/", "~1")
        operations = [{"op": "add", "path": f"/status/capacity/{name}", "value": str(count)}]
        self.plane.client().patch(f"{_NODE_PATH}/status", operations)

    def is_ready(self) -> bool:
        """Tell whether pods can be scheduled now; never raises."""
        try:
            return self._is_schedulable() and self._proxy_is_healthy()
        except OSError:
            return False

    def _is_schedulable(self) -> bool:
        node = self.plane.client().get(_NODE_PATH)
        if node is None or node["spec"].get("taints"):
            return False
        conditions = {entry["type"]: entry["status"] for entry in node["status"].get("conditions", ())}
        return conditions.get("Ready") == "True"

    def _proxy_is_healthy(self) -> bool:
        try:
            address = f"http://127.0.0.1:{self.plane.record.ports.proxy_health}/healthz"
            with urllib.request.urlopen(address, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _accounts_exist(self) -> bool:
        return self.plane.client().get("/api/v1/namespaces/default/serviceaccounts/default") is not None

    def _runtime_answers(self) -> bool:
        return node_images.can_list(self._layout)
