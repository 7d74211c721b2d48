"""Rendered configuration of the node's components: pure text and data from the cluster's layout.

Each line that is not a default has its reason: the kind of machine this runs on, or not leaving anything behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpilot_tools.cluster import cgroups, pause_image
from kvpilot_tools.cluster.control_plane import NODE_NAME, POD_RANGE
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.network import BRIDGE


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
        "iptables": {"localhostNodePorts": False, "minSyncPeriod": "0s", "masqueradeAll": not bridge_is_filtered()},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def bridge_is_filtered() -> bool:
    """Tell whether packets inside the bridge pass the packet filter; if not, a neighbour's answers would miss it."""
    try:
        return Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text().strip() == "1"
    except OSError:
        return False
