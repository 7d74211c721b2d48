"""What the node's containerd holds, through its own command-line client: images, and containers of earlier clusters.

Not for building images (that is `images`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvpilot_tools.cluster.errors import StartError
from kvpilot_tools.cluster.layout import ClusterLayout
from kvpilot_tools.cluster.requirements import require_program


def can_list(layout: ClusterLayout) -> bool:
    """Tell whether images can be listed: with a damaged store containerd answers other questions, but not this one."""
    return layout.containerd_socket.exists() and _ctr(layout, "images", "ls", "-q").returncode == 0


def import_image(layout: ClusterLayout, archive: Path) -> None:
    """Import an image archive for the kubelet's use."""
    done = _ctr(layout, "images", "import", str(archive))
    if done.returncode != 0:
        raise StartError(f"containerd did not take {archive}: {done.stderr.strip()}")


def forget_containers(layout: ClusterLayout) -> bool:
    """Remove the containers that an earlier cluster left in the image store; returns whether there were any."""
    listed = _ctr(layout, "containers", "ls", "-q").stdout.split()
    if listed:
        _ctr(layout, "containers", "rm", *listed)
    return bool(listed)


def remove_images(layout: ClusterLayout, names: list[str]) -> None:
    """Remove images from the node."""
    _ctr(layout, "images", "rm", *names)


def image_names(layout: ClusterLayout) -> set[str]:
    """Return the names of the images that the node has."""
    done = _ctr(layout, "images", "ls", "-q")
    if done.returncode != 0:
        raise StartError(f"containerd does not answer: {done.stderr.strip()}")
    return set(done.stdout.split())


def _ctr(layout: ClusterLayout, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [str(require_program("ctr")), "--address", str(layout.containerd_socket), "-n", "k8s.io", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
