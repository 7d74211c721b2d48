"""Finding the cluster's binaries, and building from Go modules those that are nowhere.

Only the standard library is used, so that this runs before any set-up. Looked at in this order: KVPILOT_ASSETS (a
folder; a binary there must fit), PATH (used when its version fits), the per-user cache, a build into that cache.
Invariant: a binary in the cache has a stamp of exactly the sources and flags that it was built from; without it, it
is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.errors import BuildError, RequirementError
from kvpilot_tools.cluster.layout import cache_home
from kvpilot_tools.cluster.progress import Progress

KUBERNETES_VERSION = "1.34.4"  # the last line whose kubelet takes cgroup v1 and containerd 1.6 without being told to
ETCD_VERSION = "3.6.16"
HELM_VERSION = "3.22.0"
PAUSE_VERSION = "1"

_MODULES = Path(__file__).parent / "gomodules"
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.\d+)?")
_STRIP = "-s -w"
_KUBERNETES_LDFLAGS = (
    f"{_STRIP} -X k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}"
    f" -X k8s.io/component-base/version.gitMajor={KUBERNETES_VERSION.split('.')[0]}"
    f" -X k8s.io/component-base/version.gitMinor={KUBERNETES_VERSION.split('.')[1]}"
)


@dataclass(frozen=True, slots=True)
class Asset:
    """One binary: how to recognise one that fits and how to build it."""

    name: str
    version: str
    package: str
    """The Go package; with `@` it is installed on its own, else built in the module folder named by `module`."""
    module: str | None = None
    version_argv: tuple[str, ...] | None = None
    """Arguments that make it print its version; None: never taken from PATH."""
    ldflags: str = _STRIP

    @property
    def folder(self) -> str:
        """The folder in the cache, named by what is in it and its version."""
        return f"{self.module or self.name}-{self.version}"

    def fits(self, printed: str) -> bool:
        """Tell whether a printed version is of the same minor line as ours."""
        found = _VERSION.search(printed)
        return found is not None and found.groups() == self._minor_line()

    def _minor_line(self) -> tuple[str, ...]:
        major, minor, *_ = self.version.split(".")
        return major, minor


def _kubernetes(name: str, *version_argv: str) -> Asset:
    return Asset(
        name=name,
        version=KUBERNETES_VERSION,
        package=f"k8s.io/kubernetes/cmd/{name}",
        module="kubernetes",
        version_argv=version_argv or ("--version",),
        ldflags=_KUBERNETES_LDFLAGS,
    )


ETCD = Asset("etcd", ETCD_VERSION, ".", module="etcd", version_argv=("--version",))
API_SERVER = _kubernetes("kube-apiserver")
CONTROLLER_MANAGER = _kubernetes("kube-controller-manager")
SCHEDULER = _kubernetes("kube-scheduler")
KUBELET = _kubernetes("kubelet")
KUBE_PROXY = _kubernetes("kube-proxy")
KUBECTL = _kubernetes("kubectl", "version", "--client")
HELM = Asset(
    "helm",
    HELM_VERSION,
    f"helm.sh/helm/v3/cmd/helm@v{HELM_VERSION}",
    version_argv=("version", "--template={{.Version}}"),
)
PAUSE = Asset("pause", PAUSE_VERSION, ".", module="pause")

API_ONLY_ASSETS = (ETCD, API_SERVER, CONTROLLER_MANAGER, KUBECTL)
# The expensive shared packages come first, with the API server, so the rest only adds what is its own.
ALL_ASSETS = (ETCD, API_SERVER, CONTROLLER_MANAGER, SCHEDULER, KUBELET, KUBECTL, KUBE_PROXY, HELM, PAUSE)


@dataclass(frozen=True, slots=True)
class AssetStore:
    """Looks binaries up and builds the missing ones."""

    cache: Path
    override: Path | None
    search_path: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> AssetStore:
        """Build the store from KVPILOT_ASSETS, PATH and the user's cache folder."""
        override = environ.get("KVPILOT_ASSETS")
        return cls(
            cache=cache_home(environ),
            override=Path(override) if override else None,
            search_path=environ.get("PATH", ""),
        )

    def find(self, asset: Asset) -> Path | None:
        """Return the binary if there is one that fits; None if it has to be built."""
        if self.override is not None and (given := self.override / asset.name).exists():
            return self._checked_override(asset, given)
        if asset.version_argv is not None and (found := shutil.which(asset.name, path=self.search_path)):
            printed = _printed_version(Path(found), asset.version_argv)
            if asset.fits(printed):
                return Path(found)
        cached = self._cached(asset)
        return cached if _is_current(cached, asset) else None

    def ensure(self, assets: Iterable[Asset], progress: Progress) -> dict[str, Path]:
        """Return the path of every binary by name, building what is missing."""
        wanted = tuple(assets)
        found = {asset.name: path for asset in wanted if (path := self.find(asset)) is not None}
        missing = [asset for asset in wanted if asset.name not in found]
        if not missing:
            return found
        go = shutil.which("go", path=self.search_path)
        if go is None:
            names = ", ".join(asset.name for asset in missing)
            raise RequirementError(
                f"missing: {names}; there is no `go` on PATH to build them. Install Go 1.24 or newer, or put them"
                f" (Kubernetes {KUBERNETES_VERSION}, etcd {ETCD_VERSION}) into a folder and name it in KVPILOT_ASSETS."
            )
        for number, asset in enumerate(missing, start=1):
            with self._building(progress):
                # Another build may have made it while we waited for the lock.
                if not _is_current(self._cached(asset), asset):
                    self._build(asset, go, progress, f"{number} of {len(missing)}")
            found[asset.name] = self._cached(asset)
        return found

    def _checked_override(self, asset: Asset, given: Path) -> Path:
        if asset.version_argv is not None:
            printed = _printed_version(given, asset.version_argv)
            if not asset.fits(printed):
                raise RequirementError(
                    f"KVPILOT_ASSETS: {given} says it is {printed.strip()[:60]!r},"
                    f" but {asset.name} {asset.version} is needed"
                )
        return given

    def _cached(self, asset: Asset) -> Path:
        return self.cache / "bin" / asset.folder / asset.name

    @contextmanager
    def _building(self, progress: Progress) -> Iterator[None]:
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "build.lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    progress.beat("waiting for another build of the same binaries")
                    time.sleep(0.5)
            yield

    def _build(self, asset: Asset, go: str, progress: Progress, position: str) -> None:
        target = self._cached(asset)
        target.parent.mkdir(parents=True, exist_ok=True)
        work = self.cache / "go" / asset.folder
        shutil.rmtree(work, ignore_errors=True)
        if asset.module is None:
            work.mkdir(parents=True)
            argv = [go, "install", "-ldflags", asset.ldflags, asset.package]
        else:
            shutil.copytree(_MODULES / asset.module, work)
            argv = [go, "build", "-ldflags", asset.ldflags, "-o", str(work / asset.name), asset.package]
        log = target.parent / f"{asset.name}.build.log"
        env = dict(os.environ, CGO_ENABLED="0", GOFLAGS="-trimpath", GOBIN=str(work), GOWORK="off")
        started = time.monotonic()
        progress.line(f"building {asset.name} {asset.version} from Go modules ({position})")
        with log.open("w") as output:
            process = subprocess.Popen(
                argv, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                code = _wait_with_beats(process, f"building {asset.name} ({position})", progress)
            except BaseException:
                process.kill()
                process.wait()
                raise
        if code != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BuildError(f"building {asset.name} failed; the whole log is in {log}\n{tail}")
        stamp = _stamp_file(target)
        stamp.unlink(missing_ok=True)
        (work / asset.name).replace(target)
        stamp.write_text(json.dumps({"recipe": recipe_hash(asset)}))
        shutil.rmtree(work, ignore_errors=True)
        progress.line(f"built {asset.name} in {time.monotonic() - started:.0f} s ({position})")


def recipe_hash(asset: Asset) -> str:
    """Return a hash over everything that decides what a build produces, the Go tool chain excepted."""
    digest = hashlib.sha256(f"{asset.package}\n{asset.version}\n{asset.ldflags}\n".encode())
    if asset.module is not None:
        for file in sorted((_MODULES / asset.module).iterdir()):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _stamp_file(binary: Path) -> Path:
    return binary.with_name(f"{binary.name}.stamp")


def _is_current(binary: Path, asset: Asset) -> bool:
    try:
        stamp = json.loads(_stamp_file(binary).read_text())
    except (OSError, ValueError):
        return False
    return binary.exists() and isinstance(stamp, dict) and stamp.get("recipe") == recipe_hash(asset)


def _printed_version(binary: Path, argv: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            [str(binary), *argv], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _wait_with_beats(process: subprocess.Popen[bytes], what: str, progress: Progress) -> int:
    started = time.monotonic()
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            progress.beat(f"{what}, {time.monotonic() - started:.0f} s")
