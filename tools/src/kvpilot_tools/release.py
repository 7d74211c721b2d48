"""The operator as a Helm release on a cluster: install or upgrade, and uninstall."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvpilot_tools.cluster.assets import HELM, AssetStore
from kvpilot_tools.repository import CHART


class HelmError(Exception):
    """helm said no; the message is its own."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release of our chart."""

    kubeconfig: Path
    name: str = "kvpilot"
    namespace: str = "kvpilot-system"
    timeout_s: int = 180

    def install(self, image: str, *settings: str, values: Path | None = None) -> str:
        """`helm upgrade --install --wait` with that operator image; `settings` are --set arguments."""
        repository, _, tag = image.rpartition(":")
        chosen = [f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never", *settings]
        arguments = ["upgrade", "--install", self.name, str(CHART), "--create-namespace", "--wait"]
        arguments += ["--timeout", f"{self.timeout_s}s", *(["-f", str(values)] if values else [])]
        for setting in chosen:
            arguments += ["--set", setting]
        return self._helm(*arguments)

    def uninstall(self) -> None:
        self._helm("uninstall", self.name, "--ignore-not-found", "--wait", "--timeout", f"{self.timeout_s}s")

    def _helm(self, *arguments: str) -> str:
        binary = AssetStore.from_environ(os.environ).find(HELM)
        if binary is None:
            raise HelmError("there is no helm yet: `make setup-all` builds one")
        command = [str(binary), "--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s + 60, check=False)
        if done.returncode != 0:
            raise HelmError(done.stderr.strip())
        return done.stdout
