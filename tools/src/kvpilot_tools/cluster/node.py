"""The node: containerd with its own folders, the pod network, the kubelet and kube-proxy.

Not for the control plane, nor for cleaning. Invariant: nothing here uses the system's containerd, the system's
kubelet folder or the system's CNI configuration, so a machine that has those keeps them undisturbed.
"""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvpilot_tools.cluster import cgroups, mounts, pause_image
from kvpilot_tools.cluster.control_plane import NODE_NAME, POD_RANGE, START_LIMIT_S, ControlPlane
from kvpilot_tools.cluster.errors import StartError
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.network import BRIDGE
from kvpilot_tools.cluster.processes import Daemon, stop
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.cluster.requirements import require_program

GPU_RESOURCE = "nvidia.com/gpu"
RUNTIME_LIMIT_S = 20.0
MAX_OWN_IMAGES = 16
"""Each change of the operator makes an image of its own; above this the node starts without those of earlier runs."""

_OWN_IMAGES = "localhost/"
_NODE_PATH = f"/api/v1/nodes/{NODE_NAME}"


def render_containerd(layout: ClusterLayout, cni_plugins: Path) -> str:
    """Return containerd's configuration."""
    cri = "io.containerd.grpc.v1.cri"
    return f"""\
version = 2
root = "{layout.image_store}"
state = "{layout.containerd_state}"
# `opt` would make /opt/containerd; the snapshotters would probe the disk for what is not used.
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{layout.containerd_socket}"
[plugins."{cri}"]
  sandbox_image = "{pause_image.REFERENCE}"
  # Without CAP_SYS_RESOURCE runc may not lower an oom score and dies while it creates the container.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
[plugins."{cri}".cni]
  bin_dir = "{cni_plugins}"
  conf_dir = "{layout.config}/cni"
[plugins."{cri}".containerd]
  snapshotter = "overlayfs"
[plugins."{cri}".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."{cri}".containerd.runtimes.runc.options]
  Root = "{layout.containerd_state}/runc"
"""


def build_cni_config(layout: ClusterLayout) -> dict[str, Any]:
    """Return the pod network: a bridge with one range of addresses. Masquerading is one rule of our own."""
    return {
        "cniVersion": "0.4.0",
        "name": "kvpilot",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "hairpinMode": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(layout.root / "addresses"),
                    "ranges": [[{"subnet": POD_RANGE}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def build_kubelet_config(layout: ClusterLayout, port: int, health_port: int) -> dict[str, Any]:
    """Return the kubelet's configuration."""
    pki = layout.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet.key",
        "port": port,
        "readOnlyPort": 0,
        "healthzPort": health_port,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroups.group_name(layout.name)}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "failCgroupV1": False,
        "oomScoreAdj": 0,
        # kube-proxy makes the chains that it needs; these would be left over.
        "makeIPTablesUtilChains": False,
        "podLogsDir": f"{layout.logs}/pods",
        "volumePluginDir": f"{layout.kubelet_root}/volume-plugins",
        # Images can't be pulled again, so a full disk must neither delete them nor evict pods before it is really full.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "5s",
    }


def build_proxy_config(kubeconfig: Path, health_port: int, metrics_port: int) -> dict[str, Any]:
    """Return kube-proxy's configuration; zeros leave the machine's connection tracking as it is."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": NODE_NAME,
        "clusterCIDR": POD_RANGE,
        "healthzBindAddress": f"127.0.0.1:{health_port}",
        "metricsBindAddress": f"127.0.0.1:{metrics_port}",
        "oomScoreAdj": 0,
        "iptables": {"localhostNodePorts": False, "minSyncPeriod": "0s", "masqueradeAll": not _bridge_is_filtered()},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _bridge_is_filtered() -> bool:
    """Tell whether packets inside the bridge pass the packet filter; if not, a neighbour's answers would miss it."""
    try:
        return Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text().strip() == "1"
    except OSError:
        return False


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
        (layout.config / "containerd.toml").write_text(render_containerd(layout, plugins))
        (layout.config / "cni" / "kvpilot.conflist").write_text(json.dumps(build_cni_config(layout)))
        kubelet = build_kubelet_config(layout, ports.kubelet, ports.kubelet_health)
        (layout.config / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
        proxy = build_proxy_config(layout.config / "kube-proxy.kubeconfig", ports.proxy_health, ports.proxy_metrics)
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
        if forget_containers(layout):
            # It has read them already, and would report them to the kubelet.
            self._stop_containerd()
            self._start_containerd(environ, progress)
        names = image_names(layout)
        if len([name for name in names if name.startswith(_OWN_IMAGES)]) > MAX_OWN_IMAGES:
            progress.line("forgetting the images of earlier runs, there are many")
            remove_images(layout, sorted(names))
        if pause_image.REFERENCE not in image_names(layout):
            archive = layout.root / "pause.tar"
            pause_image.write_archive(self.plane.binaries["pause"], archive)
            import_image(layout, archive)
            archive.unlink()

    def _start_containerd(self, environ: Mapping[str, str], progress: Progress) -> None:
        containerd = self.containerd()
        containerd.start(environ)
        try:
            containerd.wait_ready(self._runtime_answers, limit_s=RUNTIME_LIMIT_S, beat=progress.beat)
        except StartError as error:
            # The store outlives clusters; one that was damaged must not stop every later one.
            progress.line(f"starting with an empty image store ({error.args[0].splitlines()[0]})")
            self._stop_containerd()
            mounts.release(self._layout.image_store)
            mounts.remove_tree(self._layout.image_store)
            self._layout.image_store.mkdir(parents=True)
            containerd.start(environ)
            containerd.wait_ready(self._runtime_answers, limit_s=RUNTIME_LIMIT_S, beat=progress.beat)

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
        """Tell whether images can be listed: with a damaged store it answers other questions, but not this one."""
        listed = ("-n", "k8s.io", "images", "ls", "-q")
        return self._layout.containerd_socket.exists() and _ctr(self._layout, *listed).returncode == 0


def import_image(layout: ClusterLayout, archive: Path) -> None:
    """Import an image archive for the kubelet's use."""
    done = _ctr(layout, "-n", "k8s.io", "images", "import", str(archive))
    if done.returncode != 0:
        raise StartError(f"containerd did not take {archive}: {done.stderr.strip()}")


def forget_containers(layout: ClusterLayout) -> bool:
    """Remove the containers that an earlier cluster left in the image store; returns whether there were any."""
    listed = _ctr(layout, "-n", "k8s.io", "containers", "ls", "-q").stdout.split()
    if listed:
        _ctr(layout, "-n", "k8s.io", "containers", "rm", *listed)
    return bool(listed)


def remove_images(layout: ClusterLayout, names: list[str]) -> None:
    """Remove images from the node."""
    _ctr(layout, "-n", "k8s.io", "images", "rm", *names)


def image_names(layout: ClusterLayout) -> set[str]:
    """Return the names of the images that the node has."""
    done = _ctr(layout, "-n", "k8s.io", "images", "ls", "-q")
    if done.returncode != 0:
        raise StartError(f"containerd does not answer: {done.stderr.strip()}")
    return set(done.stdout.split())


def _ctr(layout: ClusterLayout, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [str(require_program("ctr")), "--address", str(layout.containerd_socket), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
