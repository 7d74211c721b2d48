"""Where everything of one cluster lies, from its name alone.

Not for finding binaries (assets) or for starting anything. Invariant: all state of a cluster is below `root`, so
removing that folder removes the cluster's files; the few things that Kubernetes keeps elsewhere are named in
`cleanup`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.errors import RequirementError

DEFAULT_NAME = "local"
CONTEXT_NAME = "kvpilot-local"
SYSTEM_STATE = Path("/var/lib/kvpilot")

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,30}[a-z0-9])?")


def state_home(environ: Mapping[str, str], *, is_root: bool) -> Path:
    """Return the folder that holds one folder per cluster."""
    if is_root:
        return SYSTEM_STATE / "cluster"
    base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "kvpilot" / "cluster"


def cache_home(environ: Mapping[str, str]) -> Path:
    """Return the per-user folder for what is expensive to make and can be made again."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvpilot"


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The paths of one cluster."""

    name: str
    root: Path
    image_store: Path
    """containerd's images and snapshots, in the user's cache: giving a node its images again costs half a minute."""

    @property
    def settings_file(self) -> Path:
        """What was decided at `up` and must be known at `down`: mode, ports, what the machine had before."""
        return self.root / "cluster.json"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.root / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.root / "pki"

    @property
    def logs(self) -> Path:
        """One log file per component, and the pods' logs in `pods`."""
        return self.root / "logs"

    @property
    def pids(self) -> Path:
        """One file per running component."""
        return self.root / "pids"

    @property
    def config(self) -> Path:
        """Rendered configuration files."""
        return self.root / "config"

    @property
    def etcd_data(self) -> Path:
        """The database."""
        return self.root / "etcd"

    @property
    def containerd_state(self) -> Path:
        """What containerd keeps while containers run; mounts are below it."""
        return self.root / "containerd" / "state"

    @property
    def containerd_socket(self) -> Path:
        """Where containerd listens."""
        return self.root / "containerd" / "containerd.sock"

    @property
    def kubelet_root(self) -> Path:
        """The kubelet's folder; pods' volumes are mounted below it."""
        return self.root / "kubelet"

    def make_folders(self) -> None:
        """Create the folders that components expect; the cluster's root is the owner's alone."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for folder in (self.pki, self.logs, self.pids, self.config, self.etcd_data):
            folder.mkdir(exist_ok=True)
        self.etcd_data.chmod(0o700)


def layout_for(name: str, environ: Mapping[str, str] | None = None) -> ClusterLayout:
    """Return the layout of the cluster of that name for the present user; refuses names that are no DNS label."""
    if not _NAME.fullmatch(name):
        raise RequirementError(
            f"cluster name {name!r}: use 1 to 32 lower-case letters, digits and dashes, a letter first"
        )
    known = os.environ if environ is None else environ
    home = state_home(known, is_root=os.geteuid() == 0)
    return ClusterLayout(name=name, root=home / name, image_store=cache_home(known) / "containerd")
