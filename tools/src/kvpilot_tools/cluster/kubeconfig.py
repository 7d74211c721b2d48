"""Kubeconfig files: writing ours, and choosing between ours and one that the user named.

Invariant: a cluster that we did not make is used only when both its file and its context are named.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvpilot_tools.cluster.certificates import KeyPair, write_private
from kvpilot_tools.cluster.errors import RequirementError
from kvpilot_tools.cluster.layout import CONTEXT_NAME

FILE_VARIABLE = "KVPILOT_KUBECONFIG"
CONTEXT_VARIABLE = "KVPILOT_CONTEXT"


def build_kubeconfig(server: str, authority: bytes, user: str, keys: KeyPair) -> dict[str, Any]:
    """Return a kubeconfig with one context and everything inlined, so that the file can be copied."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": CONTEXT_NAME, "cluster": {"server": server, "certificate-authority-data": _encode(authority)}}
        ],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": _encode(keys.certificate),
                    "client-key-data": _encode(keys.key),
                },
            }
        ],
        "contexts": [{"name": CONTEXT_NAME, "context": {"cluster": CONTEXT_NAME, "user": user}}],
        "current-context": CONTEXT_NAME,
    }


def write_kubeconfig(file: Path, config: Mapping[str, Any]) -> None:
    """Write it readable by its owner only: it holds a key."""
    write_private(file, yaml.safe_dump(dict(config), sort_keys=False).encode())


@dataclass(frozen=True, slots=True)
class ChosenCluster:
    """A cluster that the user named in the environment."""

    kubeconfig: Path
    context: str


def chosen_cluster(environ: Mapping[str, str]) -> ChosenCluster | None:
    """Return the cluster that the environment names, if any; refuses a file without an explicit context."""
    file, context = environ.get(FILE_VARIABLE), environ.get(CONTEXT_VARIABLE)
    if not file:
        if context:
            raise RequirementError(
                f"{CONTEXT_VARIABLE}={context!r} is set, but {FILE_VARIABLE} is not: name the file as well"
            )
        return None
    path = Path(file)
    try:
        parsed = yaml.safe_load(path.read_text())
        names = [entry["name"] for entry in parsed["contexts"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RequirementError(f"{FILE_VARIABLE}={file!r} can't be read as a kubeconfig: {error}") from error
    if not context:
        raise RequirementError(
            f"{FILE_VARIABLE} is set, so {CONTEXT_VARIABLE} must name the context to use (one of: {', '.join(names)});"
            " its current-context is never used, or a forgotten setting could point tests at a real cluster"
        )
    if context not in names:
        raise RequirementError(f"{CONTEXT_VARIABLE}={context!r} is not in {file} (it has: {', '.join(names)})")
    return ChosenCluster(kubeconfig=path, context=context)


def write_chosen(chosen: ChosenCluster, target: Path) -> None:
    """Write a copy whose current context is the chosen one, for programs that take nothing but a file."""
    config = yaml.safe_load(chosen.kubeconfig.read_text())
    write_kubeconfig(target, {**config, "current-context": chosen.context})


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()
