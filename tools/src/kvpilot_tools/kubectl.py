"""kubectl as a library: the tools and the end-to-end tests speak to the cluster the way a person does."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvpilot_tools.cluster.assets import KUBECTL, AssetStore

Object = dict[str, Any]
T = TypeVar("T")


class KubectlError(Exception):
    """kubectl said no; the message is its own."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One cluster and one namespace."""

    binary: Path
    kubeconfig: Path
    namespace: str = "default"
    timeout_s: float = 60.0
    """Limit of one call."""

    @classmethod
    def for_kubeconfig(cls, kubeconfig: Path, namespace: str = "default") -> Kubectl:
        binary = AssetStore.from_environ(os.environ).find(KUBECTL)
        if binary is None:
            raise KubectlError("there is no kubectl yet: `make setup-all` builds one")
        return cls(binary=binary, kubeconfig=kubeconfig, namespace=namespace)

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run one command and return its output; raises KubectlError with what it printed."""
        command = [str(self.binary), "--kubeconfig", str(self.kubeconfig), "-n", self.namespace, *arguments]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=self.timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {' '.join(arguments)}: no answer in {self.timeout_s:g} s") from error
        if done.returncode != 0:
            raise KubectlError(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def apply(self, manifest: Object | str) -> str:
        """`kubectl apply -f -` of one object or of YAML text."""
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        return self.run("apply", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> Object | None:
        """The object, or None when it does not exist."""
        try:
            found: Object = json.loads(self.run("get", kind, name, "-o", "json"))
        except KubectlError as error:
            if "NotFound" in str(error):
                return None
            raise
        return found

    def list(self, kind: str, *, selector: str = "") -> list[Object]:
        extra = ("-l", selector) if selector else ()
        items: list[Object] = json.loads(self.run("get", kind, "-o", "json", *extra))["items"]
        return items

    def patch(self, kind: str, name: str, patch: Object, *extra: str) -> None:
        """A JSON merge patch."""
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(patch), *extra)

    def delete(self, kind: str, name: str, *extra: str) -> None:
        self.run("delete", kind, name, "--ignore-not-found", *extra)


def wait_for(look: Callable[[], T | None], what: str, *, limit_s: float, report: Callable[[], str] | None = None) -> T:
    """Call `look` until it returns something true; TimeoutError says what was waited for and what was seen."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            seen = f"\n{report()}" if report else ""
            raise TimeoutError(f"waited {limit_s:g} s for: {what}{seen}")
        time.sleep(0.25)
