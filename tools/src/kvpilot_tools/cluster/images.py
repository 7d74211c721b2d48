"""Container images without a registry: a base by debootstrap, Dockerfiles by buildah or docker, loading.

Not for what is in our images (that is in the Dockerfiles). Invariant: what the machine needs for downloads while
building (its certificates, its pip configuration) is mounted for the build and is never part of an image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvpilot_tools.cluster import mounts, node_images, pip_settings
from kvpilot_tools.cluster.errors import BuildError, RequirementError
from kvpilot_tools.cluster.layout import ClusterLayout, cache_home
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.cluster.requirements import IMAGE_PACKAGES, ensure_packages, find_program, require_program

BASE_REFERENCE = "localhost/kvpilot-base:bookworm-2"
"""The number goes up with the packages below: an image that is there is not made again."""
SUITE = "bookworm"

_BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libgomp1")
_CERTIFICATES = Path("/etc/ssl/certs")
_OWN_AUTHORITIES = Path("/usr/local/share/ca-certificates")
_NOT_IN_THE_BASE = ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/cache/debconf/*-old", "var/log/*.log")


def use_docker() -> bool:
    """Tell whether a docker engine answers; its client alone is of no use."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    try:
        done = subprocess.run([docker, "info"], capture_output=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def private_authorities(named: Path | None, own: Path = _OWN_AUTHORITIES) -> list[Path]:
    """Return what a build must see of the machine's trust: nothing, unless it trusts more than the public authorities.

    `named` is the file that pip is told to use; `own` is where an administrator puts authorities on Debian.
    """
    if named is None and not any(own.glob("**/*.crt")):
        return []
    folders = [_CERTIFICATES] if _CERTIFICATES.is_dir() else []
    if named is None or _CERTIFICATES in named.parents or not named.exists():
        return folders
    return [*folders, named]


@dataclass(frozen=True)
class ImageStore:
    """Builds and keeps images with the tool that this machine has."""

    environ: Mapping[str, str]
    progress: Progress

    @cached_property
    def is_docker(self) -> bool:
        """Whether docker does the work; otherwise buildah."""
        return use_docker()

    @property
    def _folder(self) -> Path:
        return cache_home(self.environ) / "images"

    def prepare(self) -> None:
        """Make sure that the tools are there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() != 0 and not self.is_docker:
            raise RequirementError(
                "building images needs root (buildah, debootstrap), or a docker engine that you may use"
            )
        wanted = tuple(package for package in IMAGE_PACKAGES if not (self.is_docker and package.name == "buildah"))
        ensure_packages(wanted, self.progress)

    def has(self, reference: str) -> bool:
        """Tell whether the image is in the store."""
        inspect = ["docker", "image", "inspect"] if self.is_docker else [*_buildah(), "inspect", "--type", "image"]
        return subprocess.run([*inspect, reference], capture_output=True, check=False).returncode == 0

    def make_base(self) -> bool:
        """Make the base image unless it is there; returns whether it was made."""
        if self.has(BASE_REFERENCE):
            return False
        root = self._folder / f"rootfs-{SUITE}"
        if not root.exists():
            self._debootstrap(root)
        self.progress.line("making the base image from it")
        if self.is_docker:
            archive = self._folder / "rootfs.tar"
            self._run("base image", ["tar", "-C", str(root), "-cf", str(archive), "."])
            self._run("base image", ["docker", "import", str(archive), BASE_REFERENCE])
            archive.unlink()
        else:
            container = self._run("base image", [*_buildah(), "from", "--pull-never", "scratch"]).split()[-1]
            self._run("base image", [*_buildah(), "add", "--quiet", container, str(root), "/"])
            self._run("base image", [*_buildah(), "config", "--cmd", "/bin/sh", "--env", "LANG=C.UTF-8", container])
            self._run("base image", [*_buildah(), "commit", "--quiet", "--rm", container, BASE_REFERENCE])
        shutil.rmtree(root)
        return True

    def build(self, dockerfile: Path, tag: str, context: Path) -> None:
        """Build a Dockerfile on our base image."""
        with tempfile.TemporaryDirectory(prefix="build-", dir=self._folder) as scratch:
            settings = pip_settings.read()
            if self.is_docker:
                argv = ["docker", "build", "--network", "host"]
                # docker build mounts no folders of the machine: settings go as predefined arguments, which no image
                # keeps.
                argv += [f"--build-arg={name}={value}" for name, value in pip_settings.proxies(self.environ).items()]
            else:
                argv = [*_buildah(), "build", "--isolation", "chroot", "--network", "host", "--layers"]
                config = Path(scratch) / "pip.conf"
                config.write_text(pip_settings.render(settings))
                shared = [
                    *private_authorities(pip_settings.certificate(settings)),
                    *pip_settings.local_folders(settings),
                ]
                argv.append(f"--volume={config}:/etc/pip.conf:ro")
                argv += [f"--volume={path}:{path}:ro" for path in shared]
            argv += ["--build-arg", f"BASE={BASE_REFERENCE}", "--tag", tag, "--file", str(dockerfile), str(context)]
            self._run(f"building {tag}", argv)

    def load(self, reference: str, layout: ClusterLayout) -> None:
        """Give an image of the store to the cluster's node."""
        with tempfile.TemporaryDirectory(prefix="load-", dir=self._folder) as scratch:
            archive = Path(scratch) / "image.tar"
            if self.is_docker:
                argv = ["docker", "save", "--output", str(archive), reference]
            else:
                argv = [*_buildah(), "push", "--quiet", reference, f"docker-archive:{archive}:{reference}"]
            self._run(f"loading {reference}", argv)
            node_images.import_image(layout, archive)

    def _debootstrap(self, root: Path) -> None:
        partial = root.with_name(f"{root.name}.partial")
        mounts.release(partial)  # one that was killed leaves its /proc mounted
        mounts.remove_tree(partial)
        self.progress.line(f"making a Debian {SUITE} base with debootstrap, once for this user (one to three minutes)")
        argv = [str(require_program("debootstrap")), "--variant=minbase", f"--include={','.join(_BASE_PACKAGES)}"]
        self._run("debootstrap", [*argv, SUITE, str(partial)])
        for pattern in _NOT_IN_THE_BASE:
            for path in partial.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        partial.replace(root)

    def _run(self, what: str, argv: list[str]) -> str:
        """Run one command with its whole output in a log; returns what it printed to standard output."""
        log = self._folder / f"{re.sub(r'[^a-z0-9.]+', '-', what)}.log"
        started = time.monotonic()
        env = dict(self.environ, BUILDAH_ISOLATION="chroot")
        with log.open("w") as output:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
            try:
                while process.poll() is None:
                    self.progress.beat(f"{what}: {time.monotonic() - started:.0f} s, last: {_last_line(log)}")
                    time.sleep(0.1)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        printed = log.read_text(errors="replace")
        if process.returncode != 0:
            tail = "\n".join(printed.splitlines()[-15:])
            raise BuildError(f"{what} failed; the whole log is in {log}\n{tail}")
        return printed


def _buildah() -> list[str]:
    return [str(find_program("buildah") or "buildah"), "--storage-driver", "overlay"]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:80] if lines else ""
