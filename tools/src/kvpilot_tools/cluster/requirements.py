"""What a machine must offer for a cluster with a node, and what to say when it does not.

Looking changes nothing; only `install_packages` does, and only as root on a Debian-like machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.errors import BuildError, RequirementError
from kvpilot_tools.cluster.layout import cache_home
from kvpilot_tools.cluster.progress import Progress

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
INSTEAD = (
    "Instead: name a cluster of your own with KVPILOT_KUBECONFIG (the file) and KVPILOT_CONTEXT (its context),"
    " or use `kvpilot-cluster up --api-only`, which needs no root and runs no pods."
)

_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Package:
    """A Debian package and the program by which we see that it is there."""

    name: str
    program: str


NODE_PACKAGES = (
    Package("containerd", "containerd"),
    Package("runc", "runc"),
    Package("containernetworking-plugins", "cni:bridge"),
    Package("iptables", "iptables"),
    Package("iproute2", "ip"),
    Package("conntrack", "conntrack"),
    Package("socat", "socat"),
)
IMAGE_PACKAGES = (Package("buildah", "buildah"), Package("debootstrap", "debootstrap"))


def find_program(name: str) -> Path | None:
    """Return a system program's path, also when the user's PATH has no sbin folders; `cni:NAME` finds a CNI plugin."""
    if name.startswith("cni:"):
        plugins = (folder / name.removeprefix("cni:") for folder in CNI_FOLDERS)
        return next((plugin for plugin in plugins if plugin.exists()), None)
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}")
    return Path(found) if found else None


def require_program(name: str) -> Path:
    """Return a system program's path; raises RequirementError without it."""
    found = find_program(name)
    if found is None:
        raise RequirementError(f"the program {name!r} is missing. {INSTEAD}")
    return found


def missing_packages(packages: tuple[Package, ...]) -> list[Package]:
    """Return the packages whose program is not there."""
    return [package for package in packages if find_program(package.program) is None]


def node_obstacles() -> list[str]:
    """Return what no package can mend: the reasons why this machine and user can't run a node."""
    if sys.platform != "linux":
        return [f"this is {sys.platform}, not Linux"]
    return describe_obstacles(
        is_root=os.geteuid() == 0,
        capabilities=effective_capabilities(Path("/proc/self/status").read_text()),
        has_memory_cgroup=(_CGROUPS / "memory").is_dir() or (_CGROUPS / "cgroup.controllers").exists(),
    )


def describe_obstacles(*, is_root: bool, capabilities: int, has_memory_cgroup: bool) -> list[str]:
    """Return the reasons against a node that these facts are, in words."""
    obstacles = []
    if not is_root:
        obstacles.append("you are not root (a node mounts file systems and changes the network)")
    else:
        for name, bit in (("CAP_SYS_ADMIN", _CAP_SYS_ADMIN), ("CAP_NET_ADMIN", _CAP_NET_ADMIN)):
            if not capabilities >> bit & 1:
                obstacles.append(f"the capability {name} is missing (in a container: start it with --privileged)")
    if not has_memory_cgroup:
        obstacles.append(f"no memory cgroup is mounted at {_CGROUPS}")
    return obstacles


def effective_capabilities(status: str) -> int:
    """Return the effective capability bits from the text of /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def check_node(progress: Progress) -> None:
    """Make sure that a node can run here; installs packages if we may, else the error says all that is missing."""
    obstacles = node_obstacles()
    if obstacles:
        raise RequirementError(f"a node can't run here: {'; '.join(obstacles)}. {INSTEAD}")
    ensure_packages(NODE_PACKAGES, progress)


def ensure_packages(packages: tuple[Package, ...], progress: Progress) -> None:
    """Install the packages that are missing; raises RequirementError with the command when we may not."""
    missing = missing_packages(packages)
    if not missing:
        return
    names = [package.name for package in missing]
    command = f"apt-get install -y --no-install-recommends {' '.join(names)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RequirementError(f"missing programs of the packages {', '.join(names)}; as root: {command}. {INSTEAD}")
    progress.line(f"installing Debian packages: {' '.join(names)}")
    install_packages(names, os.environ, progress)


def install_packages(names: list[str], environ: Mapping[str, str], progress: Progress) -> None:
    """Install Debian packages; their daemons are not started, since this cluster starts its own."""
    log = cache_home(environ) / "apt-get.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    env = dict(environ, DEBIAN_FRONTEND="noninteractive", RUNLEVEL="1")
    with log.open("w") as output:
        for argv in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *names]):
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            while True:
                try:
                    code = process.wait(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    progress.beat(" ".join(argv[:2]))
            if code != 0 and argv[1] == "install":  # a failed update of one source need not hinder the installation
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise BuildError(f"{' '.join(argv)} failed; the whole log is in {log}\n{tail}")
